"""From text to examples: documents, packing, pairs of sentences, masks."""

import bz2
import csv
import gzip
import json
import lzma
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.datasets import pretraining
from distill_runner.datasets.corpora import Corpus, CorpusPart, TransferPart, TransferSet
from distill_runner.datasets.readers import hub
from distill_runner.datasets.splits import CorpusSplit, TokenSplit
from distill_runner.datasets.tokenization import SpecialTokens
from distill_runner.training.config import Optim
from distill_runner.training.data import CorpusData, epoch_order, epoch_updates
from distill_runner.training.devices import Device

CPU = Device.from_name("cpu", "fp32")
EMBEDDED = CorpusPart(dataset="embedded:text", columns=["text"], validation="validation", document_column="topic")


def corpus(folder: Path | None = None, *, part: dict[str, Any] | None = None, **values: Any) -> Corpus:
    text = (
        CorpusPart(dataset=str(folder), **({"columns": ["text"], "train": "*"} | (part or {}))) if folder else EMBEDDED
    )
    return Corpus(**{"name": "mine", "parts": {"text": text}, "max_length": 32, "hold_out": 3} | values)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vocabulary")
    pretraining.train_wordpiece(corpus().texts("train"), 600, folder)
    return AutoTokenizer.from_pretrained(folder)


def documents(lengths: list[list[int]]) -> pretraining.Documents:
    """Documents of sentences of these lengths, their tokens numbered from 1."""
    flat = [length for document in lengths for length in document]
    ids = np.arange(1, sum(flat) + 1)
    return pretraining.Documents(ids, np.cumsum([0, *flat]), np.cumsum([0, *map(len, lengths)]))


LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=6)


# Documents.


CODECS = {".zst": "zstd", ".lz4": "lz4"}


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
def test_compressed_text_is_the_text(extension: str, tmp_path: Path) -> None:
    """Corpora are published as .txt.gz and .jsonl.zst; of each, a slice and a pattern of names too."""
    paragraphs = [f"Paragraph {number},\nof two lines." for number in range(20)]
    contents = {"a.txt": "\n\n".join(paragraphs), "b.jsonl": "".join(f'{{"text": "{n}"}}\n' for n in range(20))}
    for name, content in contents.items():
        data = content.encode()
        codecs: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        codec = codecs.get(extension, lambda data: pyarrow.compress(data, CODECS[extension], asbytes=True))
        (tmp_path / f"{name}{extension}").write_bytes(codec(data))

    def texts(split: str) -> list[str]:
        part = CorpusPart(dataset=str(tmp_path), columns=["text"], train=split)
        return [text for document in part.documents(split) for text in document]

    assert texts("a") == paragraphs
    assert texts("b") == [*map(str, range(20))]
    assert texts("b[:10%]") == ["0", "1"]
    assert texts(f"*.txt{extension}[18:]") == paragraphs[18:]


@pytest.mark.parametrize("form", ["packed", "pairs"])
def test_later_epochs_of_a_stream_read_what_the_first_saved(
    form: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is downloaded once for each split; every epoch has all examples, in another order and masked anew."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [f'{{"text": {json.dumps(text)}}}\n' for text in corpus().texts("train")]
    for number in range(2):
        (folder / f"train-{number}.jsonl").write_text("".join(lines[number::2]))
    commit = SimpleNamespace(name=str(folder), sha=None)
    monkeypatch.setattr("distill_runner.datasets.readers.hub.dataset_commit", lambda _data: commit)
    passes, stream = list[str](), hub.stream_from_hub

    def counted(data: Any, split: str) -> Any:
        passes.append(split)
        return stream(data, split)

    monkeypatch.setattr(hub, "stream_from_hub", counted)
    hub_part = CorpusPart(dataset="acme/text", columns=["text"], train="train")
    values: dict[str, Any] = {"examples": form, "hold_out": 20, "exponent": 0.7}
    streamed = corpus(parts={"text": hub_part, "more": EMBEDDED}, stream=True, **values)
    saved = corpus(parts={"text": hub_part.model_copy(update={"dataset": str(folder)}), "more": EMBEDDED}, **values)
    splits = list[CorpusSplit]()
    for name, text, split in (("a", streamed, "train"), ("b", streamed, "validation"), ("c", saved, "train")):
        (tmp_path / name).mkdir()
        pretraining.write_examples(tmp_path / name, text, split, tokenizer)  # type: ignore[arg-type]
        splits.append(CorpusSplit(tmp_path / name))
    assert len(passes) >= 3  # documents are counted, read, and read for the validation split
    assert (tmp_path / "a" / "ids.npy").read_bytes() == (tmp_path / "c" / "ids.npy").read_bytes()
    num_passes = len(passes)

    data, optim = CorpusData(streamed, splits[0], splits[1], tokenizer, 3, CPU), Optim(lr=1.0, batch_size=8, epochs=2)

    def batches(epoch: int, first_step: int = 0) -> list[list[list[int]]]:
        updates = epoch_updates(data, optim, 3, epoch, first_step)
        return [[batch.input_ids.tolist() for batch in update.batches] for update in updates]

    first, second = batches(0), batches(1)
    assert first != second
    assert batches(1, 5) == second[5:]
    orders = [epoch_order(len(data), 3, epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(len(splits[0]))]
    assert len(passes) == num_passes


def rows(folder: Path, header: list[str], lines: list[list[str]]) -> Path:
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return folder


def test_patterns_take_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a-1.txt", "a-2.txt", "b-1.txt", "more/a-3.txt", "more/c.jsonl"):
        (tmp_path / name).write_text(name if name.endswith("txt") else '{"text": "c"}')
    for name in ("z-1", "z-2"):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write(f'{{"text": "{name}"}}\n' * 2)

    def texts(pattern: str) -> list[str]:
        part = CorpusPart(dataset=str(tmp_path), columns=["text"], train=pattern)
        return [text for document in part.documents(pattern) for text in document]

    assert texts("a-*") == ["a-1.txt", "a-2.txt"]
    assert texts("?-1.txt") == ["a-1.txt", "b-1.txt"]
    assert texts("*/a-*.txt") == ["more/a-3.txt"]
    assert texts("*/*.jsonl") == ["c"]
    assert texts("z-*") == ["z-1", "z-1", "z-2", "z-2"]
    assert texts("z-*[1:3]") == ["z-1", "z-2"]
    with pytest.raises(UserError, match="no such split"):
        texts("d-*")


@given(size=st.integers(1, 30), start=st.integers(0, 30), share=st.integers(0, 100))
def test_slices_of_text_share_it_out(
    tmp_path_factory: pytest.TempPathFactory, size: int, start: int, share: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text("\n\n".join(map(str, range(size))))

    def numbers(split: str) -> list[int]:
        part = CorpusPart(dataset=str(folder), columns=["text"], train=split)
        try:
            return [int(text) for document in part.documents(split) for text in document]
        except UserError:  # a slice without rows
            return []

    assert numbers(f"train[:{start}]") + numbers(f"train[{start}:]") == list(range(size))
    for order in ("", "~"):
        first, second = numbers(f"train[{order}:{share}%]"), numbers(f"train[{order}{share}%:]")
        assert sorted(first + second) == list(range(size))
        assert len(first) == round(size * share / 100)


def test_headings_begin_documents_and_blank_rows_are_left_out(tmp_path: Path) -> None:
    lines = [" = One = ", "", "text", " = = Part = = ", "more", " = Two = ", "end"]
    rows(tmp_path, ["number", "text"], [[str(number), line] for number, line in enumerate(lines)])
    part = CorpusPart(dataset=str(tmp_path), columns=["text"], document_start="= [^=]")
    assert list(part.documents("train")) == [["= One =", "text", "= = Part = =", "more"], ["= Two =", "end"]]
    by_number = CorpusPart(dataset=str(tmp_path), columns=["text"], rows_per_document=5)
    assert list(map(len, by_number.documents("train"))) == [4, 2]
    rows(tmp_path, ["body", "title"], [["a", "x"], ["b", "x"], ["c", "y"], ["d", "x"]])
    by_title = CorpusPart(dataset=str(tmp_path), columns=["body"], document_column="title")
    assert list(by_title.documents("train")) == [["a", "b"], ["c"], ["d"]]
    assert list(by_title.model_copy(update={"limit": 2}).documents("train")) == [["a", "b"], ["c"]]


def test_held_out_documents_do_not_train(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"number {n}" for n in range(10)))
    read = corpus(tmp_path, hold_out=4)
    held, trained = (list(read.texts(split)) for split in ("validation", "train"))
    assert held == ["number 0", "number 4", "number 8"]
    assert sorted(held + trained) == [f"number {n}" for n in range(10)]


def test_parts_follow_each_other_and_where_they_lie_is_no_part_of_them(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, text in zip(folders, ("one", "two", "one"), strict=True):
        folder.mkdir()
        (folder / "text.txt").write_text("\n\n".join([text] * 2))
    a, b, c = (CorpusPart(dataset=str(folder), columns=["text"], train="*") for folder in folders)
    both = corpus(parts={"x": a, "y": b})
    assert list(both.texts("train")) == ["one", "two"]
    assert corpus(parts={"first": c, "second": b}, name="renamed", stream=True).spec() == both.spec()
    assert corpus(parts={"x": b, "y": a}).spec() != both.spec()


# Examples.


@given(LENGTHS, st.integers(1, 20))
def test_packing_loses_no_token(lengths: list[list[int]], room: int) -> None:
    source = documents(lengths)
    blocks = [first for first, _, _ in pretraining.packed_examples(source, room, separator=0)]
    assert all(len(block) == room for block in blocks[:-1])
    assert 1 <= len(blocks[-1]) <= room
    together = np.concatenate(blocks)
    assert np.array_equal(together[together != 0], np.asarray(source.ids[:]))
    assert (together == 0).sum() == len(lengths) - 1


@given(LENGTHS, st.integers(2, 40), st.sampled_from([0.0, 0.1, 1.0]))
def test_pairs_are_neighbours_or_of_two_documents(lengths: list[list[int]], room: int, short: float) -> None:
    source = documents(lengths)
    starts = np.asarray(source.sentences[:])[np.asarray(source.documents[:])]
    for first, second, label in pretraining.pair_examples(source, room, short):
        assert second is not None
        assert len(first) >= 1
        assert len(second) >= 1
        assert len(first) + len(second) <= room
        for part in (first, second):  # a run of the text, in one document
            assert np.all(np.diff(part) == 1)
        here, there = (int(np.searchsorted(starts, part[0] - 1, side="right")) for part in (first, second))
        assert (here == there) == (label == pretraining.IS_NEXT)
        if label == pretraining.IS_NEXT:
            assert second[0] > first[-1]
            assert second[0] == first[-1] + 1 or len(first) + len(second) == room  # what lay between was cut


def test_documents_without_a_token_give_no_pairs() -> None:
    filled = [[5] * 9, [3, 4] * 5, [7] * 8]
    with_empty = [[0], filled[0], [0, 0], filled[1], [], filled[2], [0]]
    assert [len(first) for first, _, _ in pretraining.passage_examples(documents(with_empty), 20)] == [
        *filled[0],
        *filled[1],
        *filled[2],
    ]
    found = [[*map(str, pretraining.pair_examples(documents(lengths), 20, 0.1))] for lengths in (filled, with_empty)]
    assert found[0] == found[1]
    assert list(pretraining.pair_examples(documents([[0], [0]]), 20, 0.1)) == []


def test_half_of_the_pairs_are_neighbours_and_all_sentences_are_used() -> None:
    source = documents([[5] * 4000] * 5)
    found = list(pretraining.pair_examples(source, 60, short=0.1))
    assert np.mean([label == pretraining.IS_NEXT for _, _, label in found]) == pytest.approx(0.5, abs=0.03)
    first = {
        int(token)
        for a, b, label in found
        for token in [*a, *(b if label == pretraining.IS_NEXT and b is not None else [])]
    }
    assert len(first) > 0.97 * len(source.ids)


def test_examples_on_disk_are_framed_as_by_the_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    for form in ("passages", "packed", "pairs"):
        (tmp_path / form).mkdir()
        pretraining.write_examples(tmp_path / form, corpus(examples=form), "validation", tokenizer)
        tokens = TokenSplit(tmp_path / form)
        lengths = np.diff(tokens.offsets)
        assert lengths.max() == 32
        assert sorted(file.suffix for file in (tmp_path / form).iterdir()) == [".npy"] * (2 + 2 * (form == "pairs"))
        for first, last in list(pairwise(tokens.offsets))[:20]:
            ids = tokens.ids[first:last].tolist()
            segments = [0] * len(ids) if tokens.segments is None else tokens.segments[first:last].tolist()
            assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
            border = ids.index(tokenizer.sep_token_id)
            assert segments == (
                [0] * (border + 1) + [1] * (len(ids) - border - 1) if form == "pairs" else [0] * len(ids)
            )
        if form == "packed":
            assert (lengths == 32).sum() == len(tokens) - 1


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_an_interruption_loses_one_portion(
    stop: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten days of tokenizing were lost to a kill, and the rest of it was kept in the artifact for ever."""
    monkeypatch.setattr("distill_runner.datasets.pretraining.PORTION_DOCUMENTS", 1)
    texts = corpus(examples="pairs")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    pretraining.write_examples(tmp_path / "whole", texts, "train", tokenizer)
    calls = list[list[str]]()
    encode = pretraining.token_ids

    def encode_some(tokenizer: Any, part: list[str]) -> list[list[int]]:
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(part)
        return encode(tokenizer, part)

    monkeypatch.setattr(pretraining, "token_ids", encode_some)
    with pytest.raises(KeyboardInterrupt):
        pretraining.write_examples(tmp_path / "stopped", texts, "train", tokenizer)
    # A killed process leaves half of a portion as well.
    with (tmp_path / "stopped" / "tokenized" / "ids.npy").open("ab") as file:
        file.write(b"half")
    portions = list[list[str]]()

    def encode_rest(tokenizer: Any, part: list[str]) -> list[list[int]]:
        portions.append(part)
        return encode(tokenizer, part)

    monkeypatch.setattr(pretraining, "token_ids", encode_rest)
    pretraining.write_examples(tmp_path / "stopped", texts, "train", tokenizer)
    assert len(portions) == len(list(texts.documents("train"))) - stop
    files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "stopped").iterdir()} == files


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_token_ids_take_as_few_bytes_as_their_vocabulary_allows(
    size: int, dtype: type, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wikipedia and books are 4 billion tokens: 8 GB instead of 20; the largest id must survive."""
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: size)
    ids = [size - 1, 7]
    monkeypatch.setattr(pretraining, "token_ids", lambda _, texts: [ids] * len(texts))
    pretraining.write_examples(tmp_path, corpus(examples="passages"), "validation", tokenizer)
    tokens = TokenSplit(tmp_path)
    assert tokens.ids.dtype == dtype
    assert tokens.batch([0]).input_ids.tolist()[1:-1] == [size - 1, 7]
    assert tokens.batch([0]).segments.sum() == 0
    assert tokens.token_ids.max() == size - 1


def test_passages_are_what_the_tokenizer_gives(tokenizer: Any, tmp_path: Path) -> None:
    pretraining.write_examples(tmp_path, corpus(examples="passages"), "validation", tokenizer)
    tokens, texts = TokenSplit(tmp_path), list(corpus().texts("validation"))
    assert len(tokens) == len(texts)
    for number in (0, 1, len(texts) - 1):
        expected = tokenizer(texts[number], truncation=True, max_length=32)["input_ids"]
        assert tokens.batch([number]).input_ids.tolist() == expected


def test_roberta_has_two_separators_between_segments() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "a": 4, "b": 5}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", cls_token="<s>", sep_token="</s>"
    )
    frame = SpecialTokens.from_tokenizer(tokenizer)
    assert frame.pair == ([0], [1, 1], [1])
    assert frame.max_text_tokens(10, pair=True) == 6
    ids, segments = frame.add_to(np.array([4, 5]), np.array([5]))
    assert ids.tolist() == [0, 4, 5, 1, 1, 5, 1]
    assert segments.tolist() == [0, 0, 0, 0, 0, 0, 0]  # RoBERTa knows no segments


@pytest.mark.parametrize("template", [None, "$A </s>"], ids=["nothing", "an end alone"])
def test_a_tokenizer_that_puts_nothing_before_a_text_is_refused(template: str | None) -> None:
    """GPT-2's and T5's."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    if template:
        raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(UserError, match=r"model.tokenizer=.*: adds no special token before a text"):
        SpecialTokens.from_tokenizer(tokenizer)


# Masks.


def masked(size: int = 100_000, seed: int = 0, **options: Any) -> tuple[torch.Tensor, ...]:
    ids_T = torch.arange(size) % 995 + 5
    special_T = torch.arange(size) % 50 == 0
    draws_3T = pretraining.mask_draws(seed, 0, [0], [size])
    return ids_T, special_T, *pretraining.mask_tokens(ids_T, special_T, torch.tensor([0]), draws_3T, 4, 1000, **options)


def test_masking_follows_bert() -> None:
    ids_T, special_T, masked_T, labels_T = masked()
    chosen_T = labels_T != -100
    assert not (chosen_T & special_T).any()
    assert torch.equal(labels_T[chosen_T], ids_T[chosen_T])
    assert torch.equal(masked_T[~chosen_T], ids_T[~chosen_T])
    assert ids_T[0] == 5  # the input was not changed in place
    assert chosen_T.sum().item() / (~special_T).sum().item() == pytest.approx(0.15, abs=0.005)
    among_T = masked_T[chosen_T]
    assert (among_T == 4).float().mean().item() == pytest.approx(0.8 + 0.1 / 1000, abs=0.015)
    assert (among_T == ids_T[chosen_T]).float().mean().item() == pytest.approx(0.1 + 0.1 / 1000, abs=0.01)
    random_T = among_T[(among_T != 4) & (among_T != ids_T[chosen_T])]
    assert random_T.float().mean().item() == pytest.approx(500, abs=30)
    assert torch.equal(masked()[2], masked_T)
    assert not torch.equal(masked(seed=1)[2], masked_T)


def test_whole_words_are_chosen_or_left() -> None:
    continues_T = torch.arange(100_000) % 3 != 0  # words of three pieces; every 50th token is special
    _, special_T, masked_T, labels_T = masked(continues_T=continues_T)
    chosen_T = labels_T != -100
    for start in range(0, 99_000, 3):
        word = slice(start, start + 3)
        kept = chosen_T[word][~special_T[word]]
        assert len(kept.unique()) == 1 or special_T[start]
    assert chosen_T.sum().item() / (~special_T).sum().item() == pytest.approx(0.15, abs=0.01)
    assert (masked_T[chosen_T] == 4).float().mean().item() == pytest.approx(0.8, abs=0.015)


def test_masking_with_probability_zero_and_one() -> None:
    ids_T, special_T = torch.tensor([2, 7, 8, 9, 3, 2, 7, 3]), torch.tensor([1, 0, 0, 0, 1, 1, 0, 1]).bool()
    starts_B, draws_3T = torch.tensor([0, 5]), pretraining.mask_draws(0, 0, [0, 1], [5, 3])
    masked_T, labels_T = pretraining.mask_tokens(ids_T, special_T, starts_B, draws_3T, 4, 10, probability=0.0)
    # One of each sequence is chosen all the same; none where all are special.
    chosen_T = labels_T != -100
    assert (int(chosen_T[:5].sum()), int(chosen_T[5:].sum())) == (1, 1)
    assert torch.equal(masked_T[~chosen_T], ids_T[~chosen_T])
    _, labels_T = pretraining.mask_tokens(ids_T, torch.ones(8).bool(), starts_B, draws_3T, 4, 10)
    assert labels_T.tolist() == [-100] * 8
    _, labels_T = pretraining.mask_tokens(ids_T, special_T, starts_B, draws_3T, 4, 10, probability=1.0)
    assert labels_T.tolist() == [-100, 7, 8, 9, -100, -100, 7, -100]


def test_an_example_is_masked_the_same_in_any_company(tokenizer: Any, tmp_path: Path) -> None:
    mine = corpus(examples="pairs", whole_word=True)
    pretraining.write_examples(tmp_path, mine, "validation", tokenizer)
    data = CorpusData(mine, CorpusSplit(tmp_path), CorpusSplit(tmp_path), tokenizer, 7, CPU)
    alone = {number: data.batch(np.array([number]), 0) for number in range(6)}
    together = data.batch(np.arange(6), 0)
    assert together.is_next is not None
    bounds = [*together.starts.tolist(), len(together.input_ids)]
    for place, number in enumerate(together.index.tolist()):
        found = together.input_ids[bounds[place] : bounds[place + 1]]
        assert torch.equal(found, alone[number].input_ids)
        assert alone[number].is_next == together.is_next[place]
    assert not torch.equal(data.batch(np.arange(6), 1).input_ids, together.input_ids)


# Transfer sets.


def transfer(folder: Path, **values: Any) -> TransferSet:
    parts = {name: TransferPart(dataset=str(folder / name), columns=["x", "y"]) for name in ("a", "b")}
    return TransferSet(**{"name": "mixed", "parts": parts} | values)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    for name, size in (("a", 5), ("b", 7)):
        (tmp_path / name).mkdir()
        rows(tmp_path / name, ["x", "y", "label"], [[f"{name}{n}", f"then {n}", "1"] for n in range(size)])
    return tmp_path


def test_smaller_transfer_sets_lie_within_larger_ones(mixed: Path) -> None:
    everything = transfer(mixed).examples()
    assert everything.labels is None
    assert everything.texts[0] == [*(f"a{n}" for n in range(5)), *(f"b{n}" for n in range(7))]
    assert everything.texts[1][5:7] == ["then 0", "then 1"]
    drawn = [transfer(mixed, size=size).examples().texts[0] for size in (3, 8, 12)]
    assert drawn[1][:3] == drawn[0]
    assert drawn[2][:8] == drawn[1]
    assert sorted(drawn[2]) == sorted(everything.texts[0])
    assert transfer(mixed, size=3).spec() != transfer(mixed, size=4).spec()


# What is refused.


def refused(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert all(re.search(word, str(caught.value)) for word in words), str(caught.value)
    assert str(caught.value).count("\n") <= 1


def test_what_cannot_be_read_is_refused(mixed: Path, tmp_path: Path) -> None:
    def texts(**part: Any) -> Callable[[], Any]:
        values = {"dataset": str(mixed / "a"), "columns": ["x"]} | part
        return lambda: list(corpus(parts={"mine": CorpusPart(**values)}).texts("train"))

    empty = tmp_path / "empty"
    empty.mkdir()
    refused(texts(dataset=str(empty)), r"corpus\.parts\.mine\.dataset=", "no data files")
    refused(texts(columns=["z"]), r"corpus\.parts\.mine\.columns=\[z\]", "no column 'z'", "x, y, label")
    refused(texts(document_column="z"), r"corpus\.parts\.mine\.document_column=z", "no column 'z'")
    refused(texts(train="other"), r"corpus\.parts\.mine\.train=other", "It has: train")
    refused(texts(dataset="someone/nothing"), r"corpus\.parts\.mine\.dataset=someone/nothing", "HF_HUB_OFFLINE")
    refused(texts(dataset="embedded:poems"), "no such embedded data")
    (empty / "blank.csv").write_text('x\n" "\n')
    refused(texts(dataset=str(empty), train="*"), r"corpus\.parts\.mine\.train=\*", "no text")
    (empty / "blank.csv").unlink()
    (empty / "broken.parquet").write_bytes(b"PAR1 not at all")
    refused(texts(dataset=str(empty), train="*"), "cannot read broken.parquet")


def test_a_transfer_set_or_a_corpus_without_enough_is_refused(mixed: Path, tokenizer: Any) -> None:
    refused(transfer(mixed, size=13).examples, r"transfer\.size=13", "12 examples")
    (mixed / "text.txt").write_text("Only this.")
    refused(lambda: pretraining.write_examples(mixed, corpus(mixed), "train", tokenizer), "corpus=mine", "hold_out")
    one = TransferPart(dataset=str(mixed / "b"), columns=["x"])
    two = TransferPart(dataset=str(mixed / "a"), columns=["x", "y"])
    refused(transfer(mixed, parts={"a": two, "b": one}).examples, r"transfer\.parts\.b\.columns=\[x\]", "2 columns")
    (mixed / "b" / "train.csv").write_text("x,y\n,1\n,2\n")
    refused(transfer(mixed, parts={"b": one}).examples, r"transfer\.parts\.b\.columns=\[x\]", "no row has a text")
    (mixed / "b" / "README.md").write_text("---\nconfigs: [\n---\n")
    refused(transfer(mixed, parts={"b": one}).examples, r"transfer\.parts\.b\.dataset=", "is no YAML")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('He said "Go." Then (he left.) Later it rained.', ['He said "Go."', "Then (he left.)", "Later it rained."]),
        ("One.\nTwo", ["One.", "Two"]),
        ("No end", ["No end"]),
        ("A 3.5 b. and c", ["A 3.5 b. and c"]),
        ('Yes!" He', ['Yes!"', "He"]),
        ("", []),
    ],
)
def test_a_sentence_keeps_its_quotes_and_brackets(text: str, sentences: list[str]) -> None:
    """Closing marks were lost, and the opening ones stayed."""
    assert pretraining.sentences_of(text) == sentences


@given(st.text(st.sampled_from(list("Ab.!? \n\"')(")), max_size=40))
def test_only_blanks_between_sentences_are_lost(text: str) -> None:
    assert "".join("".join(pretraining.sentences_of(text)).split()) == "".join(text.split())
