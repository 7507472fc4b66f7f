"""Words and their pieces: sentences cut into windows of tokens on disk, and read memory-mapped.

The head reads the first piece of each word (or all pieces, by option), so that each word has one output. A sentence of
more tokens than a window is read in several windows that overlap; each piece is read in the window where it has most
context. A word without pieces, such as an empty one, is read as the unknown token.

Words of the data are tokenized word by word. A text is tokenized as it is, and its words are those of the tokenizer's
own pre-tokenizer, cut further between letters or digits and other characters, where a token begins.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.datasets.splits import EXAMPLES_PER_CALL, TokenSplit
from distill_runner.datasets.tokenization import ArrayFile, SpecialTokens, window_owners, window_starts
from distill_runner.tasks.tokens.data import Sentence, Sentences
from distill_runner.tasks.tokens.schemes import OUTSIDE, TagSet

Pieces = Literal["first", "all"]
Misaligned = Literal["refuse", "extend", "drop"]
_WORD = re.compile(r"\w+|[^\w\s]")
"""Words of a text for tokenizers that do not say which characters a token covers."""
FILES = {
    "ids": np.int32,
    "segments": np.int8,
    "offsets": np.int64,
    "heads": np.int32,
    "head_offsets": np.int64,
    "rows": np.int64,
    "sentences": np.int64,
    "begins": np.int32,
    "ends": np.int32,
    "tags": np.int32,
    "head_tags": np.int32,
}


class Words(TokenSplit):
    """The windows of a split, memory-mapped from a folder that ``write_words`` has written.

    Shapes: W windows with O outputs in total, of N words in S sentences.

    Attributes:
        heads: (O,), position in its window of each token that the head reads.
        head_offsets: (W + 1,), the outputs of window ``w`` are ``head_offsets[w]`` to ``head_offsets[w + 1]``.
        head_tags: (O,), tag of each output; None for a split without labels.
        rows: (N,), the output of each word's first piece.
        sentences: (S + 1,), first word of each sentence, followed by N.
        begins, ends: (N,), range of characters of each word in the text of its sentence.
        tags: (N,), tag of each word; None for a split without labels.
    """

    tags: Any
    head_tags: Any

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.heads, self.head_offsets, self.rows, self.sentences, self.begins, self.ends = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("heads", "head_offsets", "rows", "sentences", "begins", "ends")
        )
        self.tags, self.head_tags = (
            np.load(folder / f"{name}.npy", mmap_mode="r") if (folder / f"{name}.npy").exists() else None
            for name in ("tags", "head_tags")
        )

    @property
    def num_outputs(self) -> int:
        """Number of outputs O: one of each word, or of each piece."""
        return len(self.heads)

    @property
    def num_examples(self) -> int:
        return len(self.sentences) - 1

    def words(self, sentence: int) -> slice:
        """Return the words of a sentence."""
        return slice(int(self.sentences[sentence]), int(self.sentences[sentence + 1]))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return a batch like ``TokenSplit.batch``, with a head that reads the pieces of its words."""
        batch = super().batch(index, length_multiple)
        index = batch.index.numpy()
        first, counts = self.head_offsets[index], np.diff(self.head_offsets)[index]
        output_rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        head_tokens = np.repeat(batch.starts.numpy(), counts) + self.heads[output_rows]
        tags = None if self.head_tags is None else torch.from_numpy(self.head_tags[output_rows].astype(np.int64))
        rows = torch.from_numpy(output_rows)
        return replace(batch, head_tokens=torch.from_numpy(head_tokens), labels=tags, output_rows=rows)


@dataclass
class _Pieces:
    """Tokens of a sentence without special tokens: ids (P,), word of each token (P,), and the ranges of its words."""

    ids: np.ndarray
    words: np.ndarray
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Cutting:
    """How sentences become windows.

    Attributes:
        max_length: maximum number of tokens of a window, including special tokens.
        overlap: tokens that neighboring windows share; at most three quarters of a window.
        pieces: pieces of a word that the head reads: ``first`` or ``all``.
        misaligned: what becomes of spans that cut a word: ``refuse``, ``extend`` to whole words, or ``drop``.
    """

    max_length: int
    overlap: int
    pieces: Pieces = "first"
    misaligned: Misaligned = "refuse"


def write_words(folder: Path, sentences: Sentences, tokenizer: Any, cutting: Cutting, tagset: TagSet) -> None:
    """Tokenize sentences and write the files that ``Words`` reads.

    What was decided on the way, such as words that are read as the unknown token, is added to ``sentences.remarks``.

    Args:
        folder: existing folder for the files.
        tagset: tags of the task, in the order of the outputs.
    Raises:
        UserError: no sentence has a word, or a span cuts a word.
    """
    frame = SpecialTokens.from_tokenizer(tokenizer)
    capacity = frame.max_text_tokens(cutting.max_length, pair=False)
    divider = _Divider(tokenizer)
    labels = _Labels(sentences, tagset, cutting.misaligned)
    names = {name: dtype for name, dtype in FILES.items() if sentences.is_labeled or "tags" not in name}
    files = {name: ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in names.items()}
    try:
        for name in ("offsets", "head_offsets", "sentences"):
            files[name].append([0])
        num_long = 0
        for sentence, pieces in zip(sentences.items, divider.divide(sentences.items), strict=True):
            tags = labels.tags(sentence, pieces.ranges) if sentences.is_labeled else None
            begins_ends = np.array(pieces.ranges, dtype=np.int32).reshape(-1, 2)
            files["begins"].append(begins_ends[:, 0])
            files["ends"].append(begins_ends[:, 1])
            files["sentences"].append([files["begins"].size])
            if tags is not None:
                files["tags"].append(tags)
            num_long += len(pieces.ids) > capacity
            _append_windows(files, pieces, tags, frame, capacity, cutting, tagset)
    finally:
        for file in files.values():
            file.__exit__()
    if not files["heads"].size:
        problem = f"no sentence of split '{sentences.split}' has a word"
        raise UserError("task.columns", None, problem, "Name the column of the words, or another split.")
    if divider.num_unknown:
        sentences.remarks.append(f"{divider.num_unknown:,} words without a token are read as {tokenizer.unk_token}")
    if num_long:
        sentences.remarks.append(f"{num_long:,} sentences of more than {cutting.max_length} tokens are read in windows")
    sentences.remarks += labels.remarks()


def _append_windows(
    files: dict[str, ArrayFile],
    pieces: _Pieces,
    tags: np.ndarray | None,
    frame: SpecialTokens,
    capacity: int,
    cutting: Cutting,
    tagset: TagSet,
) -> None:
    """Append the windows of a sentence that have outputs."""
    size, prefix = len(pieces.ids), len(frame.single[0])
    is_first = np.ones(size, dtype=bool)
    is_first[1:] = pieces.words[1:] != pieces.words[:-1]
    is_read = is_first if cutting.pieces == "first" else np.ones(size, dtype=bool)
    step = min(max(capacity - cutting.overlap, capacity // 4, 1), capacity)
    firsts = window_starts(size, capacity, step)
    lasts = np.minimum(firsts + capacity, size)
    owners = window_owners(firsts, lasts, size)
    word_rows = np.zeros(len(pieces.ranges), dtype=np.int64)
    for number, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        read = first + np.flatnonzero(is_read[first:last] & (owners[first:last] == number))
        if not len(read):
            continue
        ids, segments = frame.add_to(pieces.ids[first:last], None)
        words = pieces.words[read]
        word_rows[words[is_first[read]]] = files["heads"].size + np.flatnonzero(is_first[read])
        files["ids"].append(ids)
        files["segments"].append(segments)
        files["offsets"].append([files["ids"].size])
        files["heads"].append(prefix + read - first)
        files["head_offsets"].append([files["heads"].size])
        if tags is not None:
            files["head_tags"].append(np.where(is_first[read], tags[words], tagset.inside[tags[words]]))
    files["rows"].append(word_rows)


class _Divider:
    """Divides sentences into words and pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_unknown = tokenizer, 0
        self.of_texts = self.of_words = None
        if tokenizer.is_fast:
            self.of_texts, self.of_words = (
                _plain_tokenizer(tokenizer, has_prefix_space) for has_prefix_space in (False, True)
            )

    def divide(self, sentences: Sequence[Sentence]) -> Iterator[_Pieces]:
        for first in range(0, len(sentences), EXAMPLES_PER_CALL):
            portion = sentences[first : first + EXAMPLES_PER_CALL]
            if self.of_words is None or self.of_texts is None:
                yield from map(self._slow, portion)
                continue
            words = [sentence.word_texts() for sentence in portion if sentence.words is not None]
            texts = [sentence.text for sentence in portion if sentence.words is None]
            by_words = iter(self.of_words.encode_batch(words, is_pretokenized=True, add_special_tokens=False))
            by_texts = iter(self.of_texts.encode_batch(texts, add_special_tokens=False))
            for sentence in portion:
                if sentence.words is None:
                    yield _pieces_of_text(sentence.text, next(by_texts))
                else:
                    encoded = next(by_words)
                    yield self._complete(encoded.ids, encoded.word_ids, sentence.words)

    def _slow(self, sentence: Sentence) -> _Pieces:
        """Return the pieces of a sentence by a tokenizer that does not say which characters a token covers."""
        ranges = sentence.words
        if ranges is None:
            ranges = tuple(match.span() for match in _WORD.finditer(sentence.text))
        ids: list[int] = []
        words: list[int] = []
        for number, (begin, end) in enumerate(ranges):
            options = {"add_special_tokens": False, "is_split_into_words": True}
            own = self.tokenizer([sentence.text[begin:end]], **options)["input_ids"] if end > begin else []
            ids += own
            words += [number] * len(own)
        return self._complete(ids, words, ranges)

    def _complete(self, ids: Sequence[int], words: Sequence[int], ranges: Sequence[tuple[int, int]]) -> _Pieces:
        """Return pieces with an unknown token for each word that has none."""
        missing = np.setdiff1d(np.arange(len(ranges)), words)
        ids_P, words_P = np.asarray(ids, dtype=np.int32), np.asarray(words, dtype=np.int64)
        if len(missing):
            unknown = self.tokenizer.unk_token_id
            if unknown is None:
                problem = "has no unknown token, and some words have no token that it knows"
                raise UserError(".model.tokenizer", None, problem, "Remove empty words from the data.")
            self.num_unknown += len(missing)
            places = np.searchsorted(words_P, missing)
            ids_P, words_P = np.insert(ids_P, places, unknown), np.insert(words_P, places, missing)
        return _Pieces(ids_P, words_P, ranges)


def _plain_tokenizer(tokenizer: Any, has_prefix_space: bool) -> Any:
    """Return a copy of a fast tokenizer's backend that neither truncates nor pads.

    Args:
        has_prefix_space: whether byte-level tokenizers put a blank in front of each word, as it has in a sentence.
    """
    from tokenizers import Tokenizer

    description = json.loads(tokenizer.backend_tokenizer.to_str())
    if has_prefix_space:
        outer = description.get("pre_tokenizer") or {}
        for part in (outer, *outer.get("pretokenizers", ())):
            if part.get("type") == "ByteLevel":
                part["add_prefix_space"] = True
    copy = Tokenizer.from_str(json.dumps(description))
    copy.no_truncation()
    copy.no_padding()
    return copy


def _pieces_of_text(text: str, encoded: Any) -> _Pieces:
    """Return the pieces of a text with its words: those of the tokenizer, cut where the class of characters changes."""
    ids, words, ranges = list[int](), list[int](), list[tuple[int, int]]()
    previous = None
    for token, word, (begin, end) in zip(encoded.ids, encoded.word_ids, encoded.offsets, strict=True):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        end = max(begin, begin + len(text[begin:end].rstrip()))
        is_new = word is None or word != previous or not ranges
        if not is_new and ranges[-1][0] < ranges[-1][1] <= begin < end:
            is_new = _is_of_word(text[begin]) != _is_of_word(text[begin - 1]) or text[begin - 1].isspace()
        previous = word
        if is_new:
            ranges.append((begin, end))
        elif begin < end:  # otherwise a piece of nothing but blanks
            ranges[-1] = (ranges[-1][0] if ranges[-1][0] < ranges[-1][1] else begin, max(ranges[-1][1], end))
        ids.append(token)
        words.append(len(ranges) - 1)
    return _Pieces(np.asarray(ids, dtype=np.int32), np.asarray(words, dtype=np.int64), ranges)


def _is_of_word(character: str) -> bool:
    """Return whether a character is a letter, a digit or a mark on one."""
    return unicodedata.category(character)[0] in "LNM"


class _Labels:
    """Turns tags and spans into indices of tags, and counts what it decides."""

    def __init__(self, sentences: Sentences, tagset: TagSet, misaligned: Misaligned) -> None:
        self.split, self.tagset, self.misaligned = sentences.split, tagset, misaligned
        self.number = {name: index for index, name in enumerate(tagset.names)}
        self.cut: list[str] = []

    def remarks(self) -> list[str]:
        if not self.cut:
            return []
        action = "are extended to whole words" if self.misaligned == "extend" else "are left out"
        return [f"{len(self.cut):,} spans that cut a word {action}, first {self.cut[0]}"]

    def tags(self, sentence: Sentence, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the index of each word's tag, (n,)."""
        if sentence.tags is not None:
            return np.array([self.number[tag] for tag in sentence.tags], dtype=np.int64)
        tags = [OUTSIDE] * len(ranges)
        begins, ends = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        last_end = 0
        for span in sentence.spans or ():
            first = int(np.searchsorted(ends, span.begin, side="right"))
            last = int(np.searchsorted(begins, span.end, side="left"))
            is_exact = first < last and begins[first] == span.begin and ends[last - 1] == span.end
            if not is_exact:
                self.misfit(sentence, span.begin, span.end, ranges[first:last])
                if self.misaligned == "drop" or first >= last or first < last_end:
                    continue
            tags[first:last] = self.tagset.tags_of(span.label, last - first)
            last_end = last
        return np.array([self.number[tag] for tag in tags], dtype=np.int64)

    def misfit(self, sentence: Sentence, begin: int, end: int, words: Sequence[tuple[int, int]]) -> None:
        if self.misaligned == "refuse":
            covered = sentence.text[words[0][0] : words[-1][1]] if words else ""
            span = sentence.text[begin:end]
            problem = f"split '{self.split}' has the span '{span}', which cuts the word '{covered}', {sentence.line}"
            raise UserError("task.label", None, problem, "Repair it, or task.misaligned=extend (whole words), or drop.")
        self.cut.append(sentence.line)
