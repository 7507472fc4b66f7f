"""Words, pieces and windows: no word loses its label or shifts, whatever the tokenizer; the head against padding."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import DropoutMasks
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.padded import extract_padded
from distill_runner.tasks.tokens.sentences import Sentence, Sentences, Span
from distill_runner.tasks.tokens.tags import TagSet
from distill_runner.tasks.tokens.words import Words, span_outputs, write_words
from distill_runner.training.data import batches_with_shares
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets
from helpers.families import PACKED_FAMILIES, config_of

TAGSET = TagSet.from_names(["O", "B-x", "I-x", "B-y", "I-y"])
ODD = ["", "\u200b", "e\u0301", "\U0001f642", "don't", "\u4f60\u597d", "[SEP]", "a" * 150, "\ufeff", "naïve"]


def of_words(*rows: list[str], tags: list[list[str]] | None = None) -> Sentences:
    items = []
    for number, words in enumerate(rows):
        ends = np.cumsum([len(word) + 1 for word in words]).tolist()
        ranges = tuple((end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True))
        items.append(Sentence(" ".join(words), ranges, tuple(tags[number]) if tags else None, line=f"in row {number}"))
    return Sentences(items, "train", tags is not None)


def written(folder: Path, sentences: Sentences, tokenizer: Any, **options: Any) -> Words:
    folder.mkdir(exist_ok=True)
    write_words(folder, sentences, tokenizer, TAGSET, **{"max_length": 64, "overlap": 8} | options)
    return Words(folder)


@pytest.fixture(scope="module")
def byte_level_plain() -> Any:
    """Byte-level pieces without a blank in front of a text, as in ModernBERT."""
    vocabulary = {token: number for number, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])}
    for character in [*pre_tokenizers.ByteLevel.alphabet(), *("Ġ" + c for c in "abcdefgh")]:
        vocabulary.setdefault(character, len(vocabulary))
    merges = [("Ġ", c) for c in "abcdefgh"]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]")


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """Pieces of XLM-R's kind, with a mark in front of each word."""
    from tokenizers.processors import TemplateProcessing

    letters = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "\u2581", *map(chr, range(33, 127))]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary["\u2581a"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", special)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]")


def by_words(tokenizer: Any, words: list[str]) -> tuple[list[int], list[int]]:
    """Pieces of words that are tokenized one by one, each after a blank, and the number of the first piece of each."""
    ids: list[int] = []
    firsts = []
    for word in words:
        # a preceding word, so that the blank is read as it is within a sentence
        own = tokenizer(f"a {word}", add_special_tokens=False)["input_ids"][
            len(tokenizer("a", add_special_tokens=False)["input_ids"]) :
        ]
        firsts.append(len(ids))
        ids += own
    return ids, firsts


@pytest.mark.parametrize("name", ["wordpiece", "byte_level", "byte_level_plain", "metaspace"])
def test_heads_are_the_first_pieces(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer = request.getfixturevalue(name)
    words = ["the", "cabbage", "bad", "a", "face"]
    split = written(tmp_path, of_words(words, tags=[["O", "B-x", "I-x", "O", "B-y"]]), tokenizer)
    batch = split.batch([0])
    ids, firsts = by_words(tokenizer, words)
    assert batch.input_ids[1:-1].tolist() == ids
    assert batch.head_tokens is not None
    assert (batch.head_tokens - 1).tolist() == firsts
    assert batch.gold.tolist() == [0, 1, 2, 0, 3]


@pytest.mark.parametrize("name", ["wordpiece", "byte_level", "byte_level_plain", "metaspace"])
@pytest.mark.parametrize("pieces", ["first", "all"])
def test_odd_words_shift_nothing(name: str, pieces: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Words without pieces read the unknown token; every word has its own label and characters."""
    tokenizer = request.getfixturevalue(name)
    words = [word for odd in ODD for word in ("a", odd)]
    tags = ["B-x" if number % 2 else "O" for number in range(len(words))]
    sentences = of_words(words, [], ["", ""], tags=[tags, [], ["O", "B-y"]])
    split = written(tmp_path, sentences, tokenizer, pieces=pieces, max_length=32)
    assert split.num_examples == 3
    assert np.diff(split.bounds).tolist() == [len(words), 0, 2]
    assert [TAGSET.names[tag] for tag in split.tags] == [*tags, "O", "B-y"]
    text = sentences.items[0].text
    assert [text[b:e] for b, e in zip(split.begins[: len(words)], split.ends[: len(words)], strict=True)] == words
    assert (np.asarray(split.head_tags)[split.first_outputs] == split.tags).all()
    assert any("without a token" in remark for remark in sentences.remarks)
    read = np.zeros(split.num_outputs, dtype=int)
    for index in range(len(split)):
        batch = split.batch([index])
        assert len(batch.input_ids) <= 32
        assert len(batch.head_tokens) > 0  # type: ignore[arg-type]
        read[batch.output_index] += 1
    assert (read == 1).all()


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of which every letter is a token."""
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokens = [*(f"[unused{number}]" for number in range(5)), *names, *"abcdefghijkl"]  # the families pad with 0 and 1
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    pair = [("[CLS]", 6), ("[SEP]", 7)]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", pair)
    special = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token"), names, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_tokenizers_without_offsets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not give the characters of each token"):
        written(tmp_path, of_words(["ab"], tags=[["B-x"]]), SimpleNamespace(is_fast=False))


def test_texts_have_the_tokenizers_words(wordpiece: Any, byte_level: Any, metaspace: Any, tmp_path: Path) -> None:
    text = "\U0001f642 The dog's (New) York, 3.5%  naïve\u00a0\u4f60\u597d \n"
    spans = (Span(text.index("New"), text.index("New") + 3, "x"), Span(text.index("York"), text.index("York") + 4, "y"))
    for number, tokenizer in enumerate((wordpiece, byte_level, metaspace)):
        sentences = Sentences([Sentence(text, spans=spans, line="in row 0")], "train", True)
        split = written(tmp_path / str(number), sentences, tokenizer)
        words = [text[b:e] for b, e in zip(split.begins, split.ends, strict=True)]
        assert all(words), "blanks between words are none"
        assert "".join(words) == "".join(text.split())
        labels = {words[i]: TAGSET.names[tag] for i, tag in enumerate(split.tags) if tag}
        assert labels == {"New": "B-x", "York": "B-y"}


def test_spans_that_cut_a_word(wordpiece: Any, tmp_path: Path) -> None:
    def split(misaligned: str) -> tuple[list[str], list[str]]:
        items = [Sentence("the dogs ran", spans=(Span(4, 7, "x"), Span(9, 12, "y")), line="in row 0")]
        sentences = Sentences(items, "train", True)
        words = written(tmp_path, sentences, wordpiece, misaligned=misaligned)
        return [TAGSET.names[tag] for tag in words.tags], sentences.remarks

    with pytest.raises(UserError, match="the span 'dog', which cuts the word 'dogs', in row 0"):
        split("refuse")
    assert split("extend") == (["O", "B-x", "B-y"], ["1 spans that cut a word: task.misaligned=extend, first in row 0"])
    assert split("drop")[0] == ["O", "O", "B-y"]


def test_scores_of_spans_are_probabilities_of_words(wordpiece: Any, tmp_path: Path) -> None:
    """The rest is O's; scores at one word are added, and divided by a sum above 1. By hand, in windows of 4 words."""
    text = "the dogs ran to new york"
    spans = Span(4, 8, "x", 0.7), Span(9, 12, "x", 0.75), Span(9, 12, "y", 0.5), Span(16, 24, "y", 0.9)
    sentences = Sentences([Sentence("so", spans=()), Sentence(text, spans=spans, line="in row 1")], "train", True)
    split = written(tmp_path, replace(sentences, items=[replace(one, spans=()) for one in sentences.items]), wordpiece)
    probabilities = np.exp(span_outputs(sentences, split, TAGSET, "refuse"))[split.first_outputs]
    expected = np.zeros((7, 5))  # O, B-x, I-x, B-y, I-y
    expected[:, 0] = 1, 1, 0.3, 0, 1, 0.1, 0.1
    expected[2, 1], expected[3, [1, 3]], expected[5, 3], expected[6, 4] = 0.7, (0.6, 0.4), 0.9, 0.9
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(0, 40), st.integers(8, 40))
def test_every_word_is_read_once_with_most_context(sizes: list[int], overlap: int, max_length: int) -> None:
    words, capacity, total = ["abcdefghijkl"[:size] for size in sizes], max_length - 2, sum(sizes)
    sentences = of_words(words, tags=[["O"] * len(sizes)])
    with TemporaryDirectory() as folder:
        split = written(Path(folder), sentences, letters(), overlap=overlap, max_length=max_length)
        assert split.first_outputs.tolist() == list(range(len(sizes)))
        step, starts = min(max(capacity - overlap, capacity // 4, 1), capacity), [0]
        while starts[-1] + capacity < total:
            starts.append(starts[-1] + step)
        for word, first in enumerate(np.cumsum([0, *sizes[:-1]]).tolist()):
            window = int(np.searchsorted(split.head_offsets, word, side="right")) - 1
            position, length = int(split.heads[word]) - 1, int(np.diff(split.offsets)[window]) - 2
            ends = [(start, min(start + capacity, total)) for start in starts]
            best = max(min(first - start, end - 1 - first) for start, end in ends if start <= first < end)
            assert min(position, length - 1 - position) == best


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Words:
    rng = np.random.default_rng(0)
    rows = [["abcdefghijkl"[: rng.integers(1, 9)] for _ in range(rng.integers(1, 14))] for _ in range(40)]
    tags = [[TAGSET.names[rng.integers(5)] for _ in row] for row in rows]
    return written(tmp_path_factory.mktemp("split"), of_words(*rows, tags=tags), letters(), max_length=48)


@pytest.mark.parametrize("family", [*PACKED_FAMILIES, "mpnet"])
def test_packed_is_padded_in_float64(family: str, split: Words) -> None:
    """The logits, the loss and all gradients, against the model's own loss with -100 for other pieces."""
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_config(config_of(family, num_labels=5)).to(torch.float64).eval()
    batch = split.batch(range(12))
    assert batch.head_tokens is not None
    needs = FeatureRequest(logits=True, cls=frozenset({2}))
    ours, theirs = extract(model, batch, needs), extract_padded(model, batch, needs)
    tolerance = 1e-6 if family == "modernbert" else 1e-10  # it rotates in float32
    torch.testing.assert_close(ours.logits_OC, theirs.logits_OC, rtol=tolerance, atol=tolerance)
    loss = Classes().label_loss(ours.logits_OC, batch)
    packed = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    labels_T = torch.full((batch.num_tokens,), -100)
    labels_T[batch.head_tokens] = batch.gold
    input_ids, segments, mask = batch.to_padded()
    labels_BL = torch.full_like(input_ids, -100)
    labels_BL[mask.bool()] = labels_T
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    inputs |= {"token_type_ids": segments} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    reference = cross_entropy(model(**inputs).logits.flatten(0, 1), labels_BL.flatten())
    padded = torch.autograd.grad(reference, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, reference, rtol=tolerance, atol=tolerance)
    for one, other in zip(packed, padded, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5 if family == "modernbert" else 1e-8, atol=tolerance)


@pytest.mark.parametrize("outputs", [Classes(), Classes([1.0, 2.0, 0.5, 3.0, 1.5])])
def test_batches_add_up_to_the_mean_over_words(outputs: Classes, split: Words) -> None:
    from distill_runner.training.data import Update

    logits = torch.randn(split.num_outputs, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(split.num_outputs, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(*parts: list[int]) -> torch.Tensor:
        batches = [split.batch(part) for part in parts]
        update = Update(sum(map(len, parts)), batches, [len(part) / 30 for part in parts], 0)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches_with_shares(update):
            rows = torch.from_numpy(batch.output_index)
            value = outputs.label_loss(logits[rows], batch)
            value = value + outputs.soft_label_loss(logits[rows], teacher[rows], batch, 2.0)
            total += batch.shares[outputs.unit] * value
        return total

    everything = list(range(30))
    torch.testing.assert_close(
        loss(everything), loss(everything[:7], everything[7:9], everything[9:]), rtol=1e-12, atol=0
    )


def test_dropout_of_a_word_does_not_depend_on_its_batch(split: Words) -> None:
    """Also where as many words are read as there are sentences."""
    ones = torch.ones(split.num_outputs, 8)
    masks = torch.zeros(split.num_outputs, 8)
    for index in (range(20), range(20, 40)):
        batch = split.batch(index)
        rows = torch.from_numpy(batch.output_index)
        masks[rows] = DropoutMasks(3, batch).drop_features(ones[rows], 0.5, 1, batch.head_tokens)
    assert 0.3 < (masks == 0).float().mean() < 0.7
    for number in range(40):
        batch = split.batch([number])
        rows = torch.from_numpy(batch.output_index)
        alone = DropoutMasks(3, batch).drop_features(ones[rows], 0.5, 1, batch.head_tokens)
        assert torch.equal(alone, masks[rows])


@pytest.mark.real
def test_wnut_17_is_aligned_as_run_ner_does(data_dir: Path, minilm_folder: Path, tmp_path: Path) -> None:
    """Tokens and labels of all sentences, as ``tokenize_and_align_labels`` of ``run_ner.py`` makes them."""
    import pyarrow.parquet
    from transformers import AutoTokenizer

    from distill_runner.tasks import make_task
    from helpers.shipped_tasks import shipped_task

    fields = shipped_task("wnut17") | {"dataset": str(data_dir / "wnut_17")}
    task, tokenizer = make_task(**fields).resolved(), AutoTokenizer.from_pretrained(minilm_folder)
    assert task.scheme == "bio"
    (file,) = (data_dir / "wnut_17" / "wnut_17").glob("train-*.parquet")
    rows = [row for row in pyarrow.parquet.read_table(file).to_pylist() if row["tokens"]]
    task.write(tmp_path, task.examples("train"), tokenizer)
    split = task.open(tmp_path)
    words = [row["tokens"] for row in rows]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=128, padding=False)
    assert len(rows) == 3394
    for number, row in enumerate(rows):
        labels, previous = [], None
        for word in encoded.word_ids(number):
            labels.append(-100 if word is None or word == previous else row["ner_tags"][word])
            previous = word
        batch = split.batch([number])
        own = np.full(batch.num_tokens, -100)
        own[batch.head_tokens] = batch.labels
        assert batch.input_ids.tolist() == encoded["input_ids"][number]
        assert own.tolist() == labels


def test_a_teacher_with_a_tokenizer_of_its_own_gives_each_word_its_outputs(
    wordpiece: Any, byte_level_plain: Any, tmp_path: Path
) -> None:
    """Its words are cut into other pieces and windows."""
    rng = np.random.default_rng(0)
    rows = ([*rng.choice(["unbelievable", "cat", "Oslo", *ODD], size)] for size in rng.integers(1, 30, 9))
    sentences = of_words(*rows)
    own = written(tmp_path / "student", sentences, wordpiece, max_length=16, overlap=4)
    others = written(tmp_path / "teacher", sentences, byte_level_plain, max_length=200)
    assert len(own) != len(others)
    sizes = {"vocab_size": len(byte_level_plain), "max_position_embeddings": 256}
    config = config_of("bert", num_labels=len(TAGSET.names), **sizes)
    model = AutoModelForTokenClassification.from_config(config).eval()
    needs, device = FeatureRequest(logits=True), Device(torch.device("cpu"), "fp32")
    live = LiveTargets(model, others, needs, device)
    (tmp_path / "cache").mkdir()
    CachedTargets.write(tmp_path / "cache", live)
    cached = CachedTargets(tmp_path / "cache", device, needs)
    for index in ([0, 3, 1], [len(own) - 1], range(len(own))):
        batch = own.batch(index)
        assert torch.equal(live(batch).logits_OC, cached(batch).logits_OC)
        for word, logits in zip(batch.output_index, live(batch).logits_OC, strict=True):
            window = int(np.searchsorted(others.head_offsets, word, side="right")) - 1
            ids = torch.from_numpy(others.ids[others.offsets[window] : others.offsets[window + 1]].astype(np.int64))
            with torch.inference_mode():
                reference = model(input_ids=ids[None]).logits[0][others.heads[word]]
            torch.testing.assert_close(logits, reference, atol=2e-5, rtol=2e-5)
