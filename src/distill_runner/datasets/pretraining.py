"""Pre-training: tokenized examples made from documents, masking, and training a WordPiece vocabulary.

Examples are single passages, packed blocks, or pairs for next sentence prediction. All arrays are written and read
piece by piece, so that a corpus may be larger than memory.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.common.errors import UserError
from distill_runner.common.files import atomic_replacement
from distill_runner.common.process import environment_variable
from distill_runner.datasets.corpora import Corpus, SplitName
from distill_runner.datasets.tokenization import ArrayFile, SpecialTokens, array_files

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""Of a vocabulary that is trained on a corpus."""
IS_NEXT, IS_RANDOM = 0, 1
"""Labels of next sentence prediction, numbered as in BERT's own head."""
PAIR_SEED = 0
PORTION_DOCUMENTS = 1000
"""Documents per tokenizer call, and the work that an interruption loses."""
EXAMPLES_PER_WRITE = 1000
ARRAYS = {"ids": np.int32, "sentences": np.int64, "documents": np.int64}
"""Arrays of tokenized documents: the attributes of ``Documents``."""
SENTENCE_END = re.compile(r"""(?<=[.!?])(?P<closing>["')\]]*)\s+(?=["'(\[]*[A-Z0-9])|\n+""")

Example = tuple[np.ndarray, np.ndarray | None, int | None]
"""Tokens of the first segment, tokens of the second segment or None, and label of the pair or None."""


@dataclass(frozen=True)
class Documents:
    """Tokenized documents; each text of a document is called a sentence.

    Attributes:
        ids: tokens of all sentences.
        sentences: (S + 1,), start of each of S sentences in ``ids``, and the end of the last one.
        documents: (D + 1,), number of the first sentence of each of D documents, and the end of the last one.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents) - 1

    def bounds_of(self, number: int) -> np.ndarray:
        """Return the start in ``ids`` of each sentence of document ``number``, and the end of the last one."""
        first, last = self.documents[number : number + 2]
        return self.sentences[first : last + 1]

    @classmethod
    def tokenize(cls, texts: Iterable[list[str]], tokenizer: Any, folder: Path) -> "Documents":
        """Tokenize documents, each a list of texts, and save the arrays in ``folder``.

        A folder that an interrupted call left is continued after its last portion.
        """
        folder.mkdir(exist_ok=True)
        progress, sizes = folder / "progress.json", dict.fromkeys(ARRAYS, 0)
        if progress.exists():
            sizes = json.loads(progress.read_text(encoding="utf-8"))
        with ExitStack() as stack:
            ids, sentences, documents = files = [
                stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype, sizes[name]))
                for name, dtype in ARRAYS.items()
            ]
            if not documents.size:
                sentences.append([0])
                documents.append([0])
            rest = islice(texts, documents.size - 1, None)
            while portion := list(islice(rest, PORTION_DOCUMENTS)):
                tokens = token_ids(tokenizer, [text for document in portion for text in document])
                documents.append(sentences.size - 1 + np.cumsum(list(map(len, portion))))
                sentences.append(ids.size + np.cumsum(list(map(len, tokens))))
                ids.append(np.fromiter(chain.from_iterable(tokens), np.int32))
                for file in files:
                    file.flush()
                with atomic_replacement(progress) as partial:
                    sizes = {name: file.size for name, file in zip(ARRAYS, files, strict=True)}
                    partial.write_text(json.dumps(sizes), encoding="utf-8")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text without special tokens; a fast tokenizer uses all threads of this process."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    threads = str(torch.get_num_threads())
    with environment_variable("TOKENIZERS_PARALLELISM", "true"), environment_variable("RAYON_NUM_THREADS", threads):
        ids: list[list[int]] = tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
    return ids


def passage_examples(documents: Documents, size: int) -> Iterator[Example]:
    """Yield each text as a separate example, truncated to ``size`` tokens."""
    for first, last in pairwise(documents.sentences):
        if first < last:
            yield documents.ids[first : min(last, first + size)], None, None


def packed_examples(documents: Documents, size: int, separator: int) -> Iterator[Example]:
    """Yield blocks of exactly ``size`` tokens cut from the concatenated documents; only the last one may be shorter.

    The token ``separator`` is inserted between two documents. No token is lost.
    """
    block = np.empty(0, dtype=np.int32)
    for number in range(len(documents)):
        bounds = documents.bounds_of(number)
        border = np.full(1 if number else 0, separator, dtype=np.int32)
        block = np.concatenate([block, border, documents.ids[bounds[0] : bounds[-1]]])
        end = len(block) // size * size
        yield from ((piece, None, None) for piece in block[:end].reshape(-1, size))
        block = block[end:]
    if len(block):
        yield block, None, None


def pair_examples(documents: Documents, size: int, short: float) -> Iterator[Example]:
    """Yield pairs of segments with at most ``size`` tokens: the second follows the first, or is from another document.

    This is BERT's recipe (its ``create_pretraining_data``). Sentences are collected up to the target length and divided
    at a random place. Half of the time, a random place of another document gives the second segment; the replaced
    sentences are then used for the next pair. A single sentence cannot be divided, so its partner is always random.

    Args:
        short: share of the pairs with a random target length of at most ``size``; the others have ``size``.
    """
    rng = np.random.default_rng(PAIR_SEED)
    # Without empty sentences. Unlike other examples, pairs keep 16 bytes for each sentence in memory.
    starts = documents.sentences[:]
    sentences = np.unique(starts)
    numbers = np.searchsorted(sentences, starts[documents.documents[:]])
    documents = replace(documents, sentences=sentences, documents=np.unique(numbers))
    for number in range(len(documents)):
        # Positions in ``documents.ids``. A segment is a slice of them, so the time is linear in the length.
        bounds, start = documents.bounds_of(number), 0
        while start < len(bounds) - 1:
            target = int(rng.integers(2, size + 1)) if rng.random() < short else size
            end = _end_of_target(bounds, start, target)
            middle = start + (int(rng.integers(1, end - start)) if end - start > 1 else 1)
            first = [int(bounds[start]), int(bounds[middle])]
            if end - start > 1 and (rng.random() < 0.5 or len(documents) == 1):
                second, label, start = [int(bounds[middle]), int(bounds[end])], IS_NEXT, end
            elif len(documents) == 1:
                return  # one sentence is left, and there is no other document to pair it with
            else:
                other = int(rng.integers(len(documents) - 1))
                places = documents.bounds_of(other + (other >= number))
                place = int(rng.integers(len(places) - 1))
                stop = _end_of_target(places, place, target - (first[1] - first[0]))
                second, label, start = [int(places[place]), int(places[stop])], IS_RANDOM, middle
            # Tokens are removed from the front or back, at random, of the longer segment.
            for draw in rng.random(max(0, first[1] - first[0] + second[1] - second[0] - size)):
                longer = first if first[1] - first[0] > second[1] - second[0] else second
                if draw < 0.5:
                    longer[0] += 1
                else:
                    longer[1] -= 1
            yield documents.ids[slice(*first)], documents.ids[slice(*second)], label


def _end_of_target(bounds: np.ndarray, start: int, target: int) -> int:
    """Return the end of the sentences from ``start`` that have ``target`` tokens together, or the last end."""
    return min(max(int(np.searchsorted(bounds, bounds[start] + target)), start + 1), len(bounds) - 1)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, by their punctuation; quotes and brackets that close one belong to it."""
    ends = list(SENTENCE_END.finditer(text))
    starts = [0, *(end.end() for end in ends)]
    stops = [*(end.start() if end["closing"] is None else end.end("closing") for end in ends), len(text)]
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def write_examples(folder: Path, corpus: Corpus, split: SplitName, tokenizer: Any) -> int:
    """Tokenize a split into the files that ``CorpusSplit`` reads; ``labels`` are those of next sentence prediction.

    Returns:
        The number of passages that lost tokens; the other forms of examples lose none, or few at random.
    Raises:
        UserError: the corpus cannot be read, or its split gives no example.
    """
    special_tokens, is_paired = SpecialTokens.from_tokenizer(tokenizer), corpus.examples == "pairs"
    size = special_tokens.max_text_tokens(corpus.max_length, is_paired)
    texts = corpus.documents(split)
    if is_paired:
        texts = ([part for text in document for part in sentences_of(text)] for document in texts)
    tokenized = folder / "tokenized"
    documents = Documents.tokenize(texts, tokenizer, tokenized)
    cut = 0
    if is_paired:
        examples = pair_examples(documents, size, corpus.short_pairs)
    elif corpus.examples == "packed":
        examples = packed_examples(documents, size, tokenizer.sep_token_id)
    else:
        examples = passage_examples(documents, size)
        cut = int(np.count_nonzero(np.diff(documents.sentences) > size))
    dtypes: dict[str, type] = {"ids": np.uint16 if len(tokenizer) <= 2**16 else np.int32, "offsets": np.int64}
    dtypes |= {"segments": np.int8, "labels": np.int64} if is_paired else {}
    with array_files(folder, dtypes) as files:
        files["offsets"].append([0])
        while portion := list(islice(examples, EXAMPLES_PER_WRITE)):
            _append(portion, special_tokens, files)
        num_tokens = files["ids"].size
    rmtree(tokenized)
    if not num_tokens:
        problem = f"its {split} split has no example (corpus.examples={corpus.examples})"
        raise UserError("corpus", corpus.name, problem, "Use more text, or a smaller corpus.hold_out.")
    return cut


def _append(examples: list[Example], special_tokens: SpecialTokens, files: Mapping[str, ArrayFile]) -> None:
    """Append examples, framed by special tokens, to the arrays."""
    ids, segments = zip(*(special_tokens.add_to(first, second) for first, second, _ in examples), strict=True)
    files["offsets"].append(files["ids"].size + np.cumsum([*map(len, ids)]))
    files["ids"].append(np.concatenate(ids))
    if "labels" in files:
        files["segments"].append(np.concatenate(segments))
        files["labels"].append([label for _, _, label in examples])


# Masking and vocabulary


def mask_tokens(
    input_ids_T: Tensor,
    special_T: Tensor,
    starts_B: Tensor,
    draws_3T: Tensor,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    continues_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select tokens to predict and mask them, at least one in each sequence.

    Of the selected tokens, 80 % are replaced by [MASK], 10 % by a random token, and 10 % stay unchanged.

    Source: BERT (Devlin et al. 2019), section 3.1, task 1.

    Args:
        input_ids_T: int64, T tokens of B concatenated sequences; not modified.
        special_T: bool, tokens that are never selected.
        starts_B: position of the first token of each sequence.
        draws_3T: uniform numbers in 0..1: for selecting the token, for its replacement, and for the random token.
        mask_id: id of [MASK].
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1.
        probability: probability with which each token that is not special is selected.
        continues_T: bool, tokens that continue a word. If given, whole words are selected (BERT's whole word
            masking), each with ``probability``; each token of a selected word is then replaced independently.

    Returns:
        Masked ids (T,) and labels (T,), which are -100 for tokens that are not predicted.
    """
    draw_T = draws_3T[0]
    positions_T = torch.arange(len(input_ids_T), device=input_ids_T.device)
    if continues_T is not None:
        draw_T = draw_T[torch.where(continues_T, -1, positions_T).cummax(0).values]
    draw_T = draw_T.masked_fill(special_T, 1.0)
    sequence_T = torch.searchsorted(starts_B, positions_T, right=True) - 1
    lowest_B = draw_T.new_ones(len(starts_B)).scatter_reduce(0, sequence_T, draw_T, "amin")
    selected_T = ((draw_T < probability) | (draw_T == lowest_B[sequence_T])) & ~special_T
    masked_T = input_ids_T.masked_fill(selected_T & (draws_3T[1] < 0.8), mask_id)
    masked_T = torch.where(selected_T & (draws_3T[1] >= 0.9), (draws_3T[2] * vocab_size).long(), masked_T)
    return masked_T, input_ids_T.masked_fill(~selected_T, -100)


def mask_draws(seed: int, epoch: int, index: Iterable[int], lengths: Iterable[int]) -> Tensor:
    """Return uniform float64 numbers (3, T) for the examples ``index``, which have ``lengths`` tokens.

    The numbers of an example depend on ``seed``, ``epoch`` and its number alone. They depend neither on earlier draws,
    so that a resumed run draws the same, nor on the other examples of the batch.
    """

    bits = (np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, number]) for number in index)
    parts = [np.random.Generator(own).random((3, length)) for own, length in zip(bits, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def continuations(tokenizer: Any) -> Tensor:
    """Return which vocabulary entries continue a word, bool (V,).

    These entries start with ``##``, or, in other vocabularies, lack the mark of a word's start (Ġ, ▁).
    """
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if any(token.startswith("##") for token in tokens):
        return torch.tensor([token.startswith("##") for token in tokens])
    special = set(tokenizer.all_special_tokens)
    return torch.tensor([token not in special and not token.startswith(("Ġ", "▁")) for token in tokens])


def train_wordpiece(texts: Iterable[str], vocab_size: int, folder: Path | str) -> None:
    """Train a lower-casing BERT WordPiece vocabulary and save it for ``AutoTokenizer.from_pretrained``.

    The same texts give the same vocabulary. It contains all printable ASCII characters, so that no English word becomes
    [UNK].

    Args:
        texts: training texts.
        vocab_size: number of entries, special tokens included.
        folder: folder in which the tokenizer is saved.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from tokenizers.trainers import WordPieceTrainer
    from transformers import BertTokenizer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with TemporaryFile("w+", encoding="utf-8") as spool:  # the texts are read twice and may be larger than memory
        alphabet = set(tokenizer.normalizer.normalize_str("".join(map(chr, range(33, 127)))))
        for text in texts:
            alphabet.update(tokenizer.normalizer.normalize_str(text))
            spool.write(json.dumps(text) + "\n")
        spool.seek(0)
        characters = sorted(alphabet - set(" \n"))
        inner = [sign for sign in characters if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{sign}")) == 1]
        # By default, the trainer numbers continuation pieces in an order that differs between processes, and breaks
        # ties between equally frequent merges by these numbers. As special tokens, the pieces have fixed numbers.
        trainer = WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=SPECIAL_TOKENS + [f"##{character}" for character in inner],
            initial_alphabet=characters,
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(json.loads, spool), trainer)
    BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True).save_pretrained(folder)
