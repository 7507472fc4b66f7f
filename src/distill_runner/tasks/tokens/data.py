"""Sentences with labels of words: how they are read from rows, as words with tags or as texts with spans.

Spans are read as spaCy and Prodigy (``spans``), Doccano (``label``, ``labels`` or ``entities``) and Label Studio
(``annotations``, or ``label`` of its short form) export them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.readers.conll import WordLines
from distill_runner.datasets.readers.table import LIST, MAPPING, TEXT, is_missing, text_of
from distill_runner.datasets.readers.tables import SplitTable, listed_names
from distill_runner.tasks.printed import printed_list
from distill_runner.tasks.tokens.schemes import LETTERS, OUTSIDE, TagSet, complete_names

WORDS = ("tokens", "words", "token", "word", "sentence_words")
"""Names of columns of words, the most usual first."""
TAGS = ("ner_tags", "tags", "ner", "labels", "label", "ner_labels", "entities", "pos_tags", "pos", "upos")
"""Names of columns of tags, the most usual first."""
PARTS_OF_SPEECH = ("pos_tags", "pos", "upos")
TEXTS = ("text", "data", "sentence", "content")
ANSWER = "answer"
"""Prodigy's column with what the annotator said of a row: accept, reject or ignore."""
SPANS = ("spans", "label", "labels", "entities", "annotations", "annotation")
"""Names of columns of texts, and of their spans."""
Offsets = Literal["characters", "utf16"]
MAX_NAMES = 40
"""Number of labels up to which a message lists them all."""


@dataclass(frozen=True)
class Span:
    """An entity: characters ``begin`` to ``end`` of a text, the latter excluded."""

    begin: int
    end: int
    label: str


@dataclass(frozen=True)
class Sentence:
    """One sentence or text.

    Attributes:
        text: the text; words of the data are joined by blanks.
        words: ranges of characters of the words; None leaves the division to the tokenizer.
        tags: tag of each word; None for a text with spans, and without labels.
        spans: entities of the text in order; None for words, and without labels.
        line: where the sentence is, for messages.
        lines: line of each word in a file, for messages; empty if the data have no lines.
    """

    text: str
    words: tuple[tuple[int, int], ...] | None = None
    tags: tuple[str, ...] | None = None
    spans: tuple[Span, ...] | None = None
    line: str = ""
    lines: tuple[int, ...] = ()

    def where(self, word: int) -> str:
        """Return the place of a word, for messages."""
        return f"line {self.lines[word]}" if self.lines else f"{self.line}, word {word}"

    def word_texts(self) -> list[str]:
        """Return the words."""
        return [self.text[begin:end] for begin, end in self.words or ()]


@dataclass
class Sentences:
    """Sentences of a split.

    Attributes:
        split: name of the split, for messages.
        is_labeled: whether the sentences have tags or spans.
        remarks: what was decided in reading them; each is told once, with its number.
    """

    items: list[Sentence]
    split: str
    is_labeled: bool
    remarks: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def first(self, count: int) -> "Sentences":
        """Return the first sentences."""
        return replace(self, items=self.items[:count])

    @property
    def texts(self) -> list[list[str]]:
        """The texts, in a list of one column."""
        return [[sentence.text for sentence in self.items]]

    def tag_arrays(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of all tags, (N,), and the first word of each sentence with words, (S + 1,)."""
        number = {name: index for index, name in enumerate(names)}
        tags = [[number[tag] for tag in sentence.tags or ()] for sentence in self.items]
        flat = np.array([tag for row in tags for tag in row], dtype=np.int64)
        return flat, np.cumsum([0, *map(len, tags)])


def require_labels(sentences: Sentences, tagset: TagSet) -> None:
    """Check that all tags and labels of spans are among the task's.

    Raises:
        UserError: one is not. The message names its line, and the list of labels with it.
    """
    tags, types = set(tagset.names), set(tagset.type_names)
    for sentence in sentences.items:
        for word, tag in enumerate(sentence.tags or ()):
            if tag not in tags:
                raise _unknown_label(sentences.split, tagset, tag, f"in {sentence.where(word)}")
        for span in sentence.spans or ():
            if span.label not in types:
                raise _unknown_label(sentences.split, tagset, span.label, sentence.line)


def _unknown_label(split: str, tagset: TagSet, label: str, where: str) -> UserError:
    problem = f"split '{split}' has {label}, which is not among the labels, {where}"
    remedy = "Name all labels in task.labels, or remove these rows."
    if len(tagset.names) <= MAX_NAMES:
        is_tag = tagset.scheme == "plain" or (label[:1] in LETTERS and label[1:2] == "-")
        example = label if is_tag else f"B-{label}"
        remedy = f"Is it a mistake? Otherwise: 'task.labels=[{','.join(complete_names([*tagset.names, example]))}]'"
    return UserError("task.labels", None, problem, remedy)


def infer_columns(types: Mapping[str, str], columns: Sequence[str], label: str | None) -> tuple[str, str]:
    """Return the column of words or texts, and that of tags or spans.

    Args:
        types: columns of the data with their types.
        columns, label: what the user has set; empty and None otherwise.
    Raises:
        UserError: a column does not exist, or several are possible.
    """
    names = list(types)
    if columns:
        text = columns[0]
    else:
        has_tags = any(types.get(name) == LIST for name in TAGS)
        words = [name for name in WORDS if types.get(name) == LIST]
        texts = [name for name in TEXTS if types.get(name) in (TEXT, MAPPING)]
        lists = [name for name, kind in types.items() if kind == LIST and name not in (*TAGS, *SPANS)]
        printed = [name for name in WORDS if types.get(name) == TEXT]
        if texts and not has_tags and any(name in types for name in SPANS):
            words = []  # Prodigy's spans of texts, whose tokens are mappings
        candidates = words[:1] or texts[:1] or lists or printed
        if len(candidates) != 1:
            problem = f"cannot be inferred: the data have {listed_names(names)}"
            raise UserError("task.columns", None, problem, "'task.columns=[<words or text>]'")
        text = candidates[0]
    if label is not None:
        if label not in types:
            problem = f"no such column: the data have {listed_names(names)}"
            raise UserError("task.label", label, problem, "task.label=<column of tags or spans>")
        return text, label
    is_words = types.get(text) == LIST or text in WORDS
    return text, _inferred_label(types, text, TAGS if is_words else SPANS, is_words)


def _inferred_label(types: Mapping[str, str], text: str, usual_names: Sequence[str], is_words: bool) -> str:
    """Return the only column of lists with a usual name; parts of speech only where there are no other tags."""
    others = {name: kind for name, kind in types.items() if name != text}
    labels = [name for name in usual_names if others.get(name) in (LIST, MAPPING)]
    labels = [name for name in labels if name not in PARTS_OF_SPEECH] or labels[:1]
    labels = labels or [name for name in usual_names if name in others][:1]
    if not labels and is_words:
        lists = [name for name, kind in others.items() if kind == LIST]
        labels = lists if len(lists) == 1 else []
    if len(labels) == 1:
        return labels[0]
    if labels:
        problem = f"could be {listed_names(labels[:-1])} or {labels[-1]}"
        raise UserError("task.label", None, problem, f"task.label={labels[0]}, or another column")
    problem = f"cannot be inferred: the data have {listed_names(list(types))}"
    raise UserError("task.label", None, problem, "task.label=<column of tags or spans>")


def read_sentences(
    table: SplitTable, column: str, label: str, split: str, labeled: bool, offsets: Offsets | None = None
) -> Sentences:
    """Return the sentences of a table.

    Args:
        column: column of words (lists) or of texts.
        label: column of tags (lists) or of spans.
        labeled: whether the split needs labels; otherwise no sentence may have any.
        offsets: unit of the offsets of spans; None takes characters, or UTF-16 if the texts of the spans say so.
    Raises:
        UserError: a row has no words, no text or no labels, or they do not fit each other. The message names the row.
    """
    values, marks = table.columns[column], table.columns.get(label)
    if not labeled and (marks is None or all(mark is None for mark in marks)):
        marks = None
    elif marks is None:
        raise UserError("task.label", label, f"split '{split}' has no such column", "task.label=<tags or spans>")
    if column in WORDS or marks is not None:
        values, marks = _lists(values, marks)
    reader = _Reader(split, column, label, table.class_names, offsets)
    answers = table.columns.get(ANSWER)
    items = []
    for number, value in enumerate(values):
        mark = None if marks is None else marks[number]
        if marks is not None and not _is_annotated(value, mark, answers[number] if answers else None):
            reader.note("texts without an accepted annotation are left out", f"in row {number}")
            continue
        items.append(reader.sentence(number, value, mark, marks is not None))
    return Sentences(items, split, marks is not None, reader.remarks())


def _is_annotated(value: Any, mark: Any, answer: Any) -> bool:
    """Return whether somebody annotated a text, as Prodigy (``answer``) and Label Studio (``annotations``) say."""
    if isinstance(value, Mapping) and isinstance(mark, list):
        return any(not (isinstance(entry, Mapping) and entry.get("was_cancelled")) for entry in mark)
    return answer not in ("reject", "ignore")


def _lists(values: list[Any], marks: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Return words and labels as lists if a file of text holds them as printed lists, in all rows."""
    columns = []
    for column in (values, marks):
        parsed = [printed_list(value) if isinstance(value, str) else value for value in column or ()]
        columns.append(parsed if all(isinstance(value, list) for value in parsed) else None)
    words, labels = columns
    if marks is None:
        return words or values, None
    return (words or values if labels else values), labels or marks


class _Reader:
    """Reads rows, and counts what it decides."""

    def __init__(
        self, split: str, column: str, label: str, class_names: Sequence[str] | None, offsets: Offsets | None
    ) -> None:
        self.split, self.column, self.label, self.class_names = split, column, label, class_names
        self.offsets, self.decisions = offsets, dict[str, list[str]]()

    def remarks(self) -> list[str]:
        return [f"{len(places):,} {text}, first {places[0]}" for text, places in self.decisions.items()]

    def sentence(self, number: int, value: Any, mark: Any, is_labeled: bool) -> Sentence:
        lines = tuple(value.lines) if isinstance(value, WordLines) else ()
        line = f"in line {lines[0]}" if lines else f"in row {number}"
        if is_labeled and mark is None:
            problem = f"split '{self.split}' has no labels, {line}"
            remedy = "Remove such rows. A text without entities has [] or tags of O."
            raise UserError("task.label", self.label, problem, remedy)
        if isinstance(value, Mapping):  # Label Studio's data of a task
            texts = [text for text in value.values() if isinstance(text, str)]
            value = value.get("text", texts[0] if len(texts) == 1 else None)
        if isinstance(value, str):
            _require_characters(value, self.column, self.split, line)
            spans = None if mark is None else self.spans(value, mark, line)
            return Sentence(value, spans=spans, line=line)
        if not isinstance(value, list | tuple):
            content = "nothing" if value is None else f"a {type(value).__name__}"
            problem = f"split '{self.split}' has {content} instead of words or a text, {line}"
            raise UserError("task.columns", self.column, problem, "Remove or repair such rows.")
        try:
            words = ["" if is_missing(word) else text_of(word) for word in value]
        except ValueError as error:
            problem = f"split '{self.split}' has {error} among its words, {line}"
            raise UserError("task.columns", self.column, problem, "Give a list of words.") from error
        text, position, ranges = " ".join(words), 0, []
        _require_characters(text, self.column, self.split, line)
        for word in words:
            ranges.append((position, position + len(word)))
            position += len(word) + 1
        tags = None if mark is None else self.tags(mark, len(words), line)
        return Sentence(text, tuple(ranges), tags, line=line, lines=lines)

    def tags(self, mark: Any, num_words: int, line: str) -> tuple[str, ...]:
        if not isinstance(mark, list | tuple) or (mark and isinstance(mark[0], Mapping)):
            problem = f"split '{self.split}' has a {type(mark).__name__} instead of a list of tags, {line}"
            raise UserError("task.label", self.label, problem, "Name a column with one tag for each word.")
        if len(mark) != num_words:
            problem = f"split '{self.split}' has {num_words} words with {len(mark)} tags, {line}"
            raise UserError("task.label", self.label, problem, "Repair or remove such rows.")
        return tuple(self.tag(value, line) for value in mark)

    def tag(self, value: Any, line: str) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            if self.class_names is None:
                return str(value)
            if 0 <= value < len(self.class_names):
                return self.class_names[value]
        elif isinstance(value, str) and value.strip():
            return value.strip()
        problem = f"split '{self.split}' has the tag {value!r}, {line}"
        remedy = f"Tags are 0 to {len(self.class_names) - 1}." if self.class_names else "Every word needs a tag."
        raise UserError("task.label", self.label, problem, remedy)

    def spans(self, text: str, mark: Any, line: str) -> tuple[Span, ...]:
        """Return the spans of a text, sorted, and without blanks at their ends.

        Raises:
            UserError: a span cannot be read, lies outside of the text, or overlaps another one.
        """
        spans = []
        for begin, end, label, own_text in self.raw_spans(mark, line):
            begin, end = self.in_characters(text, begin, end, own_text, line)
            inner = text[begin:end]
            if not 0 <= begin < end <= len(text) or not inner.strip():
                problem = f"split '{self.split}' has a span {begin} to {end} of {len(text)} characters, {line}"
                raise UserError("task.label", self.label, problem, "Repair or remove it.")
            if inner != inner.strip():
                self.note("spans have blanks at their ends, which are left out", line)
                begin += len(inner) - len(inner.lstrip())
                end -= len(inner) - len(inner.rstrip())
            spans.append(Span(begin, end, label))
        spans = sorted(set(spans), key=lambda span: (span.begin, span.end))
        for span, following in pairwise(spans):
            if following.begin < span.end:
                shared = f"'{text[span.begin : span.end]}' ({span.label}) and "
                shared += f"'{text[following.begin : following.end]}' ({following.label})"
                problem = f"split '{self.split}' has spans that overlap, {shared}, {line}"
                raise UserError("task.label", self.label, problem, "A word has one label: keep one of the two.")
        return tuple(spans)

    def raw_spans(self, mark: Any, line: str) -> Iterable[tuple[int, int, str, str | None]]:
        """Yield begin, end, label, and the text that the data give for it, if they do."""
        if isinstance(mark, Mapping) and "entities" in mark:
            mark = mark["entities"]
        if not isinstance(mark, list | tuple):
            problem = f"split '{self.split}' has a {type(mark).__name__} instead of a list of tags or spans, {line}"
            remedy = "Words and tags are lists, such as ['O', 'B-PER']; spans have start, end and label."
            raise UserError("task.label", self.label, problem, remedy)
        for entry in mark:
            if isinstance(entry, Mapping) and isinstance(entry.get("result"), list):  # an annotation of Label Studio
                if entry.get("was_cancelled"):
                    continue
                if sum(1 for one in mark if not (isinstance(one, Mapping) and one.get("was_cancelled"))) > 1:
                    problem = f"split '{self.split}' has {len(mark)} annotations of one text, {line}"
                    raise UserError("task.label", self.label, problem, "Keep one annotation of each text.")
                for result in entry["result"]:
                    if isinstance(result, Mapping) and result.get("type", "labels") == "labels":
                        yield self.raw_span(result.get("value"), line)
            else:
                yield self.raw_span(entry, line)

    def raw_span(self, entry: Any, line: str) -> tuple[int, int, str, str | None]:
        try:
            if isinstance(entry, Mapping):
                begin = entry["start"] if "start" in entry else entry["start_offset"]
                end = entry["end"] if "end" in entry else entry["end_offset"]
                label = entry["label"] if "label" in entry else entry["labels"]
                text = entry.get("text")
            else:
                begin, end, label = entry
                text = None
            if isinstance(label, list | tuple):
                (label,) = label
            if not isinstance(label, str) or not label.strip() or label == OUTSIDE:
                raise ValueError(f"the label {label!r}")
            own_text = text if isinstance(text, str) and text.strip() else None
            return int(begin), int(end), label.strip(), own_text
        except (KeyError, TypeError, ValueError) as error:
            problem = f"split '{self.split}' has a span that cannot be read ({type(error).__name__}: {error}), {line}"
            raise UserError("task.label", self.label, problem, "Spans have start, end and one label.") from error

    def in_characters(self, text: str, begin: int, end: int, own_text: str | None, line: str) -> tuple[int, int]:
        """Return a span in characters; JavaScript counts a character beyond the first 65,536 as two."""
        places = [] if self.offsets == "utf16" else [(begin, end)]
        units = text.encode("utf-16-le")
        if self.offsets != "characters" and 0 <= begin <= end <= len(units) // 2:
            first = len(units[: 2 * begin].decode("utf-16-le", "replace"))
            places.append((first, first + len(units[2 * begin : 2 * end].decode("utf-16-le", "replace"))))
        for number, (first, last) in enumerate(places):
            is_same = own_text is None or text[first:last].split() == own_text.split()
            if not is_same and self.offsets is not None:
                self.note("spans have another text than the one that they name", line)
            if is_same or self.offsets is not None:
                if number and self.offsets is None:
                    self.note("spans count in UTF-16 units, as their texts show", line)
                return first, last
        problem = f"split '{self.split}' has a span of '{text[begin:end][:40]}' whose text is '{(own_text or '')[:40]}'"
        raise UserError("task.label", self.label, f"{problem}, {line}", "Repair or remove it.")

    def note(self, text: str, line: str) -> None:
        self.decisions.setdefault(text, []).append(line)


def _require_characters(text: str, column: str, split: str, line: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"split '{split}' holds half of a surrogate pair, which is no character, {line}"
        raise UserError("task.columns", column, problem, "Repair this row: its text was cut.") from error
