"""Words and their pieces: sentences cut into windows of tokens on disk, and read memory-mapped.

The head reads the first piece of each word (or all pieces, by option), so that each word has one output. A sentence of
more tokens than a window is read in several windows that overlap; each piece is read in the window where it has most
context. A word without pieces, such as an empty one, is read as the unknown token.

Words of the data are tokenized word by word. A text is tokenized as it is, and its words are those of the tokenizer's
own pre-tokenizer, cut further between letters or digits and other characters, where a token begins.
"""

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from distill_runner.common.errors import UserError, override
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch, rounded_up
from distill_runner.datasets.splits import EXAMPLES_PER_CALL, TokenSplit
from distill_runner.datasets.tokenization import SpecialTokens, array_files, array_in, cut_windows, require_offsets
from distill_runner.tasks.decoding import MIN_PROBABILITY
from distill_runner.tasks.tokens.sentences import UNITS, Sentence, Sentences, Span
from distill_runner.tasks.tokens.tags import TagSet

Ranges = Sequence[tuple[int, int]]
"""Characters of each word, the last one excluded."""
Pieces = tuple[np.ndarray, np.ndarray, Ranges, int]
"""Tokens of a sentence without special tokens: ids (P,), word of each (P,), -1 for none; ranges of the words, and how
many of these are read as the unknown token."""
FILES: dict[str, Any] = dict.fromkeys(("offsets", "head_offsets", "first_outputs", "bounds"), np.int64)
FILES |= {"segments": np.int8} | dict.fromkeys(("ids", "heads", "begins", "ends", "tags", "head_tags"), np.int32)
"""Name of an array -> its type."""


class Words(TokenSplit):
    """The windows of a split, memory-mapped from a folder that ``write_words`` has written.

    Shapes: W windows with O outputs in total, of N words in S sentences.

    Attributes:
        heads: (O,), position in its window of each token that the head reads.
        head_offsets: (W + 1,), the outputs of window ``w`` are ``head_offsets[w]`` to ``head_offsets[w + 1]``.
        head_tags: (O,), tag of each output; None for a split without labels.
        first_outputs: (N,), the output of each word's first piece.
        bounds: (S + 1,), first word of each sentence, followed by N.
        begins, ends: (N,), range of characters of each word in the text of its sentence.
        tags: (N,), tag of each word; None for a split without labels.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = ("heads", "head_offsets", "first_outputs", "bounds", "begins", "ends")
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
        self.heads, self.head_offsets, self.first_outputs, self.bounds, self.begins, self.ends = arrays
        self.tags: Any = array_in(folder, "tags")
        self.head_tags = array_in(folder, "head_tags")

    @property
    def num_outputs(self) -> int:
        """Number of outputs O: one of each word, or of each piece."""
        return len(self.heads)

    @property
    def num_examples(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return a batch like ``TokenSplit.batch``, with a head that reads the pieces of its words."""
        batch = super().batch(index, length_multiple)
        index = batch.index.numpy()
        first, counts = self.head_offsets[index], np.diff(self.head_offsets)[index]
        numbers = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        head_tokens = np.repeat(batch.starts.numpy(), counts) + self.heads[numbers]
        tags = None if self.head_tags is None else torch.from_numpy(self.head_tags[numbers].astype(np.int64))
        outputs = torch.from_numpy(numbers)
        return replace(batch, head_tokens=torch.from_numpy(head_tokens), labels=tags, output_numbers=outputs)

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        """Return the windows with the words of ``batch``, which may be of another tokenizer."""
        windows = np.unique(np.searchsorted(self.head_offsets, batch.output_index, side="right") - 1)
        return self.batch(np.resize(windows, rounded_up(len(windows), multiple)), length_multiple)


def write_words(
    folder: Path,
    sentences: Sentences,
    tokenizer: Any,
    tagset: TagSet,
    max_length: int,
    overlap: int,
    pieces: str = "first",
    misaligned: str = "refuse",
) -> None:
    """Tokenize sentences and write the files that ``Words`` reads.

    What was decided on the way, such as words that are read as the unknown token, is added to ``sentences.remarks``.

    Args:
        folder: existing folder for the files.
        tagset: tags of the task, in the order of the outputs.
        max_length, overlap, pieces, misaligned: how sentences become windows; see the fields of ``TokensTask``.
    Raises:
        UserError: the tokenizer gives no character offsets, no sentence has a word, or a span cuts a word.
    """
    require_offsets(tokenizer)
    frame = SpecialTokens.from_tokenizer(tokenizer)
    capacity, prefix = frame.max_text_tokens(max_length, pair=False), len(frame.single[0])
    tagger, num_unknown, num_long = _Tagger(sentences, tagset, misaligned), 0, 0
    dtypes = {name: dtype for name, dtype in FILES.items() if sentences.is_labeled or "tags" not in name}
    with array_files(folder, dtypes) as files:
        for name in ("offsets", "head_offsets", "bounds"):
            files[name].append([0])
        divided = _divided(sentences.items, tokenizer)
        for sentence, (ids_P, words_P, ranges, unknown) in zip(sentences.items, divided, strict=True):
            num_unknown += unknown
            begins, ends = np.array(ranges, dtype=np.int32).reshape(-1, 2).T
            files["begins"].append(begins)
            files["ends"].append(ends)
            files["bounds"].append([files["begins"].size])
            tags = tagger.tags(sentence, begins, ends) if sentences.is_labeled else None
            if tags is not None:
                files["tags"].append(tags)
            size = len(ids_P)
            num_long += size > capacity
            is_first = np.append(True, words_P[1:] != words_P[:-1])[:size]
            is_read = (is_first | (pieces == "all")) & (words_P >= 0)
            first_outputs = np.zeros(len(ranges), dtype=np.int64)
            for first, last, is_owned in cut_windows(size, capacity, capacity - overlap):
                read = first + np.flatnonzero(is_read[first:last] & is_owned)
                if not len(read):
                    continue
                ids, segments = frame.add_to(ids_P[first:last], None)
                words, begins_word = words_P[read], is_first[read]
                first_outputs[words[begins_word]] = files["heads"].size + np.flatnonzero(begins_word)
                files["ids"].append(ids)
                files["segments"].append(segments)
                files["offsets"].append([files["ids"].size])
                files["heads"].append(prefix + read - first)
                files["head_offsets"].append([files["heads"].size])
                if tags is not None:
                    files["head_tags"].append(np.where(begins_word, tags[words], tagset.inside[tags[words]]))
            files["first_outputs"].append(first_outputs)
        if not files["heads"].size:
            problem = f"no sentence of split '{sentences.split}' has a word"
            raise UserError("task.columns", None, problem, "Name the column of the words, or another split.")
    remarks = {
        f"words without a token are read as {tokenizer.unk_token}": num_unknown,
        f"sentences of more than {max_length} tokens are read in windows": num_long,
        f"spans that cut a word: task.misaligned={misaligned}, first {''.join(tagger.cut[:1])}": len(tagger.cut),
    }
    sentences.remarks += [f"{count:,} {remark}" for remark, count in remarks.items() if count]


class _Tagger:
    """Gives the words of sentences the tags of their spans.

    Attributes:
        cut: place of each span that cuts a word.
    """

    def __init__(self, sentences: Sentences, tagset: TagSet, misaligned: str) -> None:
        self.sentences, self.tagset, self.misaligned = sentences, tagset, misaligned
        self.cut = list[str]()

    def tags(self, sentence: Sentence, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the index of each word's tag, (n,)."""
        if sentence.tags is not None:
            return np.array([self.tagset.number[tag] for tag in sentence.tags], dtype=np.int64)
        tags, last = np.full(len(begins), self.tagset.outside, dtype=np.int64), 0
        for span in sentence.spans or ():
            previous, first = last, int(np.searchsorted(ends, span.begin, side="right"))
            stop = int(np.searchsorted(begins, span.end, side="left"))
            if first >= stop or begins[first] != span.begin or ends[stop - 1] != span.end:
                if self.misaligned == "refuse":
                    self._refuse(sentence, span, sentence.text[begins[first] : ends[stop - 1]] if first < stop else "")
                self.cut.append(sentence.line)
                if self.misaligned == "drop" or first >= stop or first < previous:
                    continue
            tags[first:stop] = self.tagset.tags_of(span.label, stop - first)
            last = stop
        return tags

    def _refuse(self, sentence: Sentence, span: Span, word: str) -> NoReturn:
        cut = f"the span {sentence.text[span.begin : span.end]!r}, which cuts the word {word!r}, {sentence.line}"
        remedy = "Repair it, or " + override("task.misaligned", "extend") + " (whole words), or drop."
        if (other := self.sentences.other_offsets) is not None:
            remedy = "All spans fit with " + override("task.offsets", other) + f" ({UNITS[other]})."
        key = "task.label" if np.isnan(span.score) else "task.teacher_spans"
        raise UserError(key, None, f"split '{self.sentences.split}' has {cut}", remedy)


def span_outputs(sentences: Sentences, split: Words, tagset: TagSet, misaligned: str) -> np.ndarray:
    """Return the scores of spans as outputs of the head, logarithms of probabilities, float32 (N, C).

    A span's score is the probability of its tags at its words, and the rest is that of O. Scores of several spans at
    one word are added, and divided by their sum if it is above 1.
    """
    tagger = _Tagger(sentences, tagset, misaligned)
    probability_NC = np.zeros((len(split.begins), len(tagset.names)))
    for sentence, first, last in zip(sentences.items, split.bounds[:-1], split.bounds[1:], strict=True):
        begins, ends = split.begins[first:last], split.ends[first:last]
        for span in sentence.spans or ():
            tags = tagger.tags(replace(sentence, spans=(span,)), begins, ends)
            words = np.flatnonzero(tags != tagset.outside)
            probability_NC[first + words, tags[words]] += span.score
    probability_NC /= np.maximum(probability_NC.sum(axis=1, keepdims=True), 1)
    probability_NC[:, tagset.outside] = 1 - probability_NC.sum(axis=1)
    outputs_NC = np.log(np.maximum(probability_NC, MIN_PROBABILITY)).astype(np.float32)
    return outputs_NC[np.argsort(split.first_outputs)]


def _divided(sentences: Sequence[Sentence], tokenizer: Any) -> Iterator[Pieces]:
    """Yield the pieces of each sentence."""
    of_texts, of_words = (_plain_tokenizer(tokenizer, has_prefix_space) for has_prefix_space in (False, True))
    for first in range(0, len(sentences), EXAMPLES_PER_CALL):
        portion = sentences[first : first + EXAMPLES_PER_CALL]
        words = [sentence.word_texts() for sentence in portion if sentence.words is not None]
        texts = [sentence.text for sentence in portion if sentence.words is None]
        by_words = iter(of_words.encode_batch(words, is_pretokenized=True, add_special_tokens=False))
        by_texts = iter(of_texts.encode_batch(texts, add_special_tokens=False))
        for sentence in portion:
            if sentence.words is None:
                yield _pieces_of_text(sentence.text, next(by_texts))
            else:
                yield _pieces_of_words(sentence.words, next(by_words), tokenizer.unk_token_id)


def _pieces_of_words(ranges: Ranges, encoded: Any, unknown_id: int | None) -> Pieces:
    """Return the pieces of words of the data, with an unknown token for each word that has none."""
    ids_P, words_P = np.asarray(encoded.ids, dtype=np.int32), np.asarray(encoded.word_ids, dtype=np.int64)
    missing = np.setdiff1d(np.arange(len(ranges)), words_P)
    if len(missing):
        if unknown_id is None:
            problem = "has no unknown token, and some words have no token that it knows"
            raise UserError(".model.tokenizer", None, problem, "Remove empty words from the data.")
        places = np.searchsorted(words_P, missing)
        ids_P, words_P = np.insert(ids_P, places, unknown_id), np.insert(words_P, places, missing)
    return ids_P, words_P, ranges, len(missing)


def _plain_tokenizer(tokenizer: Any, has_prefix_space: bool) -> Any:
    """Return a copy of a fast tokenizer's backend that neither truncates nor pads.

    Args:
        has_prefix_space: whether byte-level tokenizers put a blank in front of each word, as it has in a sentence.
    """
    from tokenizers import Tokenizer

    description = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    outer = description.get("pre_tokenizer") or {}
    for part in (outer, *outer.get("pretokenizers", ())):
        if has_prefix_space and part.get("type") == "ByteLevel":
            part["add_prefix_space"] = True
    return Tokenizer.from_str(json.dumps(description))


def _pieces_of_text(text: str, encoded: Any) -> Pieces:
    """Return the pieces of a text with its words: those of the tokenizer, cut where the class of characters changes."""
    words, ranges, previous = list[int](), list[tuple[int, int]](), None
    for word, (begin, end) in zip(encoded.word_ids, encoded.offsets, strict=True):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())
        end = max(begin, begin + len(text[begin:end].rstrip()))
        is_new = word is None or word != previous or not ranges
        if not is_new and ranges[-1][0] < ranges[-1][1] <= begin < end:
            classes = [unicodedata.category(text[place])[0] in "LNM" for place in (begin - 1, begin)]
            is_new = classes[0] != classes[1] or text[begin - 1].isspace()
        previous = word
        if is_new:
            ranges.append((begin, end))
        elif begin < end:  # otherwise a piece of nothing but blanks
            first, last = ranges[-1]
            ranges[-1] = (first, max(last, end)) if first < last else (begin, end)
        words.append(len(ranges) - 1)
    has_text = np.array([begin < end for begin, end in ranges], dtype=bool)  # others are pieces of nothing but blanks
    words_P = np.where(has_text, np.cumsum(has_text) - 1, -1)[np.asarray(words, dtype=np.int64)]
    return np.asarray(encoded.ids, dtype=np.int32), words_P, [own for own in ranges if own[0] < own[1]], 0
