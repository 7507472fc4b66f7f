"""Tokenised examples made from documents: single passages, packed blocks, or pairs for next sentence prediction.

All arrays are written piece by piece and memory-mapped afterwards, so that a corpus may be larger than the memory.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.array_file import ArrayFile
from distill_runner.datasets.batches import gives_segments
from distill_runner.datasets.corpora.corpus import Corpus, Held

IS_NEXT, IS_RANDOM = 0, 1
"""Labels of next sentence prediction, numbered as in BERT's own head."""
PAIR_SEED = 0
TEXTS_AT_ONCE = 1000
SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]*[A-Z0-9])|\n+""")

Example = tuple[np.ndarray, np.ndarray | None, int | None]
"""Tokens of the first segment, tokens of the second segment or None, and label of the pair or None."""


@dataclass(frozen=True)
class Documents:
    """Tokenised documents; each text of a document is called a sentence here.

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

    def of(self, number: int) -> list[np.ndarray]:
        """Return the sentences of document ``number``."""
        bounds = self.sentences[self.documents[number] : self.documents[number + 1] + 1]
        return [self.ids[first:last] for first, last in pairwise(bounds)]

    @classmethod
    def tokenised(cls, texts: Iterable[list[str]], tokenizer: Any, folder: Path) -> "Documents":
        """Tokenise documents, each a list of texts, and save the arrays in ``folder``."""
        with ArrayFile(folder / "ids.npy", np.int32) as ids, ArrayFile(folder / "lengths.npy", np.int64) as lengths:
            counts, remaining = [0], iter(texts)
            while some := list(islice(remaining, TEXTS_AT_ONCE)):
                flat = [text for document in some for text in document]
                whole = {"add_special_tokens": False, "verbose": False}  # no warning about long texts
                encoded = tokenizer(flat, return_attention_mask=False, **whole)["input_ids"]
                ids.append(np.concatenate([np.asarray(one, dtype=np.int32) for one in encoded]))
                lengths.append([len(one) for one in encoded])
                counts += [len(document) for document in some]
        sentences = np.concatenate([[0], np.cumsum(np.load(folder / "lengths.npy"))])
        return cls(np.load(folder / "ids.npy", mmap_mode="r"), sentences, np.cumsum(counts))


@dataclass(frozen=True)
class Frame:
    """Special tokens that a tokenizer puts around one segment, and around and between two segments.

    Attributes:
        segments: whether the tokenizer gives its model segment ids; if not, all are 0.
    """

    single: tuple[list[int], list[int]]
    pair: tuple[list[int], list[int], list[int]]
    segments: bool

    @classmethod
    def of(cls, tokenizer: Any) -> "Frame":
        """Return what ``tokenizer`` puts around texts.

        Raises:
            UserError: it puts no special token before a text, or none between two.
        """

        def specials(*texts: str) -> list[list[int]]:
            encoded = tokenizer(*texts, return_special_tokens_mask=True)
            runs: list[list[int]] = [[]]
            for token, special in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
                if special:
                    runs[-1].append(token)
                elif runs[-1]:
                    runs.append([])
            return runs

        single, pair = specials("a"), specials("a", "a")
        if (len(single), len(pair)) != (2, 3):
            problem = "puts no special token before a text, or none between two"
            raise UserError(".model.tokenizer", tokenizer.name_or_path, problem, "Take one with [CLS] and [SEP].")
        return cls(tuple(single), tuple(pair), gives_segments(tokenizer))  # type: ignore[arg-type]

    def put(self, first: np.ndarray, second: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of an example with special tokens, and its segment ids (0 or 1)."""
        if second is None:
            before, after = self.single
            ids = np.concatenate([before, first, after])
            return ids, np.zeros(len(ids), dtype=np.int8)
        before, between, after = self.pair
        ids = np.concatenate([before, first, between, second, after])
        segments = np.zeros(len(ids), dtype=np.int8)
        segments[-len(second) - len(after) :] = self.segments
        return ids, segments

    def room(self, max_length: int, pair: bool) -> int:
        """Return how many tokens of text fit into ``max_length`` beside the special tokens."""
        return max_length - sum(map(len, self.pair if pair else self.single))


def passages(documents: Documents, room: int) -> Iterator[Example]:
    """Yield each text as a separate example, truncated to ``room`` tokens."""
    for number in range(len(documents)):
        yield from ((text[:room], None, None) for text in documents.of(number) if len(text))


def packed(documents: Documents, room: int, separator: int) -> Iterator[Example]:
    """Yield blocks of exactly ``room`` tokens cut from the concatenated documents; only the last one may be shorter.

    No token is lost.

    **reading**: a separator stands between two documents, as in RoBERTa's FULL-SENTENCES.
    """
    block = np.empty(0, dtype=np.int64)
    for number in range(len(documents)):
        border = [np.array([separator])] if number else []
        block = np.concatenate([block, *border, *documents.of(number)])
        whole = len(block) // room * room
        yield from ((piece, None, None) for piece in block[:whole].reshape(-1, room))
        block = block[whole:]
    if len(block):
        yield block, None, None


def pairs(documents: Documents, room: int, short: float) -> Iterator[Example]:
    """Yield pairs of segments with at most ``room`` tokens: the second follows the first, or is from another document.

    This is BERT's recipe (its ``create_pretraining_data``). Sentences are collected up to the target length and divided
    at a random place. Half of the time, a random place of another document gives the second segment; the replaced
    sentences are then used for the next pair. A single sentence cannot be divided, so its partner is always random.

    Args:
        short: share of the pairs with a random target length of at most ``room``; the others have ``room``.
    """
    rng = np.random.default_rng(PAIR_SEED)
    _, filled = np.unique(documents.sentences[documents.documents], return_index=True)
    documents = replace(documents, documents=documents.documents[filled])  # without documents that have no token
    for number in range(len(documents)):
        sentences, start = [sentence for sentence in documents.of(number) if len(sentence)], 0
        while start < len(sentences):
            target = int(rng.integers(2, room + 1)) if rng.random() < short else room
            end = _reach(sentences, start, target)
            middle = start + (int(rng.integers(1, end - start)) if end - start > 1 else 1)
            first = np.concatenate(sentences[start:middle])
            if end - start > 1 and (rng.random() < 0.5 or len(documents) == 1):
                second, label, start = np.concatenate(sentences[middle:end]), IS_NEXT, end
            elif len(documents) == 1:
                return  # one sentence is left, and there is no other document to pair it with
            else:
                second, label, start = _elsewhere(documents, number, target - len(first), rng), IS_RANDOM, middle
            yield *_truncated(first, second, room, rng), label


def _reach(sentences: list[np.ndarray], start: int, target: int) -> int:
    """Return the end of the sentences from ``start`` that have ``target`` tokens together, or the end of the list."""
    lengths = np.cumsum([len(sentence) for sentence in sentences[start:]])
    return start + min(int(np.searchsorted(lengths, target)) + 1, len(lengths))


def _elsewhere(documents: Documents, but: int, target: int, rng: np.random.Generator) -> np.ndarray:
    """Return about ``target`` tokens from a random place of a random document other than number ``but``."""
    other = int(rng.integers(len(documents) - 1))
    sentences = [sentence for sentence in documents.of(other + (other >= but)) if len(sentence)]
    start = int(rng.integers(len(sentences)))
    return np.concatenate(sentences[start : _reach(sentences, start, target)])


def _truncated(
    first: np.ndarray, second: np.ndarray, room: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Remove tokens from the front or back, at random, of the longer segment until both fit into ``room``."""
    while len(first) + len(second) > room:
        part = slice(1, None) if rng.random() < 0.5 else slice(None, -1)
        first, second = (first[part], second) if len(first) > len(second) else (first, second[part])
    return first, second


def write_examples(folder: Path, corpus: Corpus, split: Held, tokenizer: Any) -> None:
    """Tokenise a split into the files that ``CorpusTokens`` reads; ``labels`` are those of next sentence prediction.

    Raises:
        UserError: the corpus cannot be read, or its split gives no example.
    """
    frame, paired = Frame.of(tokenizer), corpus.examples == "pairs"
    room = frame.room(corpus.max_length, paired)
    make: dict[str, Callable[[Documents], Iterator[Example]]] = {
        "passages": lambda documents: passages(documents, room),
        "packed": lambda documents: packed(documents, room, tokenizer.sep_token_id),
        "pairs": lambda documents: pairs(documents, room, corpus.short_pairs),
    }
    texts = corpus.documents(split)
    if paired:
        texts = ([part for text in document for part in SENTENCE_END.split(text) if part] for document in texts)
    with TemporaryDirectory(dir=folder) as place, ExitStack() as files:
        documents = Documents.tokenised(texts, tokenizer, Path(place))
        ids, segments, offsets = (
            files.enter_context(ArrayFile(folder / f"{name}.npy", dtype))
            for name, dtype in (("ids", np.int32), ("segments", np.int8), ("offsets", np.int64))
        )
        labels = files.enter_context(ArrayFile(folder / "labels.npy", np.int64)) if paired else None
        offsets.append([0])
        for first, second, label in make[corpus.examples](documents):
            example_ids, example_segments = frame.put(first, second)
            ids.append(example_ids)
            segments.append(example_segments)
            offsets.append([ids.size])
            if labels:
                labels.append([label])
    if not ids.size:
        problem = f"its {split} split gives no example (corpus.examples={corpus.examples})"
        raise UserError("corpus", corpus.name, problem, "Take more text, or a smaller corpus.hold_out.")
