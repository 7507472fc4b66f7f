"""Sentences with labels of words: how they are read from rows, as words with tags or as texts with spans.

Spans have start, end and label, as in the files of spaCy, Prodigy and Doccano, and in Label Studio's JSON-MIN.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from distill_runner.common.errors import UserError, listed_names, override
from distill_runner.datasets.readers.content import SplitTable
from distill_runner.datasets.readers.table import LIST, MAPPING, TEXT, is_missing, text_of
from distill_runner.datasets.readers.text_files import GOLD, PREDICTION, WordLines
from distill_runner.models.metadata import status_of
from distill_runner.tasks.columns import as_lists
from distill_runner.tasks.tokens.tags import OUTSIDE, TagSet, complete_names

WORDS = ("tokens", "words", "token", "word", "sentence_words")
"""Names of columns of words, the most usual first."""
TAGS = ("ner_tags", "tags", "ner", "labels", "label", "ner_labels", "entities", "pos_tags", "pos", "upos")
"""Names of columns of tags, the most usual first."""
PARTS_OF_SPEECH = ("pos_tags", "pos", "upos")
TEXTS = ("text", "sentence", "content")
"""Names of columns of texts."""
SPANS = ("spans", "label", "labels", "entities", "ents")
"""Names of columns of the spans of texts."""
LABEL_KEYS = ("label", "labels", "entity_group")  # the last one is that of pipelines of transformers
"""Names of the type of a span."""
SCORES = ("score", "probability", "confidence")
"""Names of how sure another model is of a span, from 0 to 1."""
ANSWER = "answer"
"""Prodigy's column with what the annotator said of a row: accept, reject or ignore."""
Offsets = Literal["characters", "utf16", "newlines"]
UNITS: dict[Offsets, str] = {
    "characters": "characters",
    "utf16": "UTF-16 units",
    "newlines": "characters with line ends of Windows as one",
}
"""Units of the offsets of spans, the most usual first."""
MAX_NAMES = 40
"""Number of labels up to which a message lists them all."""


class Span(NamedTuple):
    """An entity: characters ``begin`` to ``end`` of a text, the latter excluded; NaN stands for no score."""

    begin: int
    end: int
    label: str
    score: float = np.nan


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
        return f"line {self.lines[word]}" if self.lines else f"{self.line.removeprefix('in ')}, word {word}"

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
        other_offsets: unit in which all spans fit the words, where they do not in characters; None without any.
        column: column of words or texts.
    """

    items: list[Sentence]
    split: str
    is_labeled: bool
    remarks: list[str] = field(default_factory=list)
    other_offsets: Offsets | None = None
    column: str = ""

    def __len__(self) -> int:
        return len(self.items)

    def first(self, count: int) -> "Sentences":
        """Return the first sentences."""
        return replace(self, items=self.items[:count])

    @property
    def texts(self) -> list[list[str]]:
        """The texts, in a list of one column."""
        return [[sentence.text for sentence in self.items]]

    @property
    def has_spans(self) -> bool:
        """Whether labels are those of spans."""
        return self.is_labeled and any(sentence.tags is None for sentence in self.items)

    def tag_arrays(self, tagset: TagSet) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of all tags, (N,), and the bounds of the sentences, (S + 1,)."""
        tags = [[tagset.number[tag] for tag in sentence.tags or ()] for sentence in self.items]
        return np.array([tag for row in tags for tag in row], dtype=np.int64), np.cumsum([0, *map(len, tags)])

    def require_labels(self, tagset: TagSet) -> None:
        """Check that all tags and labels of spans are among the task's.

        Raises:
            UserError: one is not. The message names its line, and the list of labels with it.
        """
        for sentence in self.items:
            places = [(tag, tag, f"in {sentence.where(word)}") for word, tag in enumerate(sentence.tags or ())]
            places += [(span.label, f"B-{span.label}", sentence.line) for span in sentence.spans or ()]
            for label, tag, place in places:
                if tag not in tagset.number and (sentence.tags or label not in tagset.type_names):
                    problem = f"split '{self.split}' has {label}, which is not among the labels, {place}"
                    remedy = "Name all labels in task.labels, or remove these rows."
                    if len(tagset.names) <= MAX_NAMES:
                        names = complete_names([*tagset.names, tag])
                        remedy = "Is it a mistake? Otherwise: " + override("task.labels", names)
                    raise UserError("task.labels", None, problem, remedy)


def refuse_tree(data: Sequence[Any]) -> NoReturn:
    """Refuse the full export of Label Studio, whose rows are trees.

    Args:
        data: column with the fields of each text.
    """
    fields = dict.fromkeys(name for row in data if isinstance(row, Mapping) for name in row)
    problem = f"the data are the full export of Label Studio, of texts with {listed_names(list(fields))}"
    remedy = "Export them as JSON-MIN or CONLL2003."
    remedy += " Then name the field of the text: " + override("task.columns", [*fields][:1]) if len(fields) > 1 else ""
    raise UserError("task.columns", None, problem, remedy)


def infer_columns(types: Mapping[str, str], columns: Sequence[str], label: str | None) -> tuple[str, str]:
    """Return the column of words or texts, and that of tags or spans.

    Args:
        types: columns of the data with their types.
        columns, label: what the user has set; empty and None otherwise.
    Raises:
        UserError: a column does not exist, or several are possible.
    """
    listed = listed_names(list(types))
    lists = [name for name, kind in types.items() if kind == LIST]
    texts = [name for name in TEXTS if types.get(name) == TEXT]
    words = [name for name in WORDS if name in lists]
    if texts and not any(name in lists for name in TAGS if name not in SPANS) and any(name in types for name in SPANS):
        words = []  # Prodigy's spans of texts, whose tokens are mappings
    others = [name for name in lists if name not in (*TAGS, *SPANS)]
    candidates = columns or words[:1] or texts[:1] or others or [name for name in WORDS if name in types]
    if len(candidates) != 1:
        problem = f"cannot be inferred: the data have {listed}"
        raise UserError("task.columns", None, problem, override("task.columns", ["<words or text>"]))
    text = candidates[0]
    if label is None:
        is_words = types.get(text) == LIST or text in WORDS
        usual = [name for name in (TAGS if is_words else SPANS) if name in types and name != text]
        labels = [name for name in usual if types[name] in (LIST, MAPPING)]
        # Parts of speech are read only where there are no other tags.
        labels = [name for name in labels if name not in PARTS_OF_SPEECH] or labels[:1] or usual[:1]
        own_lists = [name for name in lists if is_words and name != text]
        labels = labels or [name for name in own_lists if name in (GOLD, PREDICTION)] or own_lists
        if len(labels) != 1:
            problem = f"could be {' or '.join(labels)}" if labels else f"cannot be inferred: the data have {listed}"
            remedy = override("task.label", labels[0] if labels else "<column of tags or spans>")
            raise UserError("task.label", None, problem, remedy)
        label = labels[0]
    elif label not in types:
        problem = f"no such column: the data have {listed}"
        raise UserError("task.label", label, problem, override("task.label", "<column of tags or spans>"))
    return text, label


def read_sentences(
    table: SplitTable,
    column: str,
    label: str,
    split: str,
    labeled: bool,
    offsets: Offsets | None = None,
    gold: bool = True,
) -> Sentences:
    """Return the sentences of a table.

    Args:
        column: column of words (lists) or of texts.
        label: column of tags (lists) or of spans.
        labeled: whether the split needs labels; otherwise no sentence may have any.
        offsets: unit of the offsets of spans; None takes characters, or UTF-16 if the texts of the spans say so.
        gold: whether the spans are labels; those of another model have scores, and may overlap.
    Raises:
        UserError: a row has no words, no text or no labels, or they do not fit each other. The message names the row.
    """
    values, marks = table.columns[column], table.columns.get(label)
    if not labeled and (marks is None or all(mark is None for mark in marks)):
        marks = None
    elif marks is None:
        problem = f"split '{split}' has no such column"
        raise UserError("task.label", label, problem, override("task.label", "<column of tags or spans>"))
    if marks is not None:
        marks = as_lists(marks)
    if column in WORDS or (marks is not None and all(isinstance(mark, list) for mark in marks)):
        values = as_lists(values)
    reader, answers = _Reader(split, column, label, table.class_names, offsets, gold), table.columns.get(ANSWER)
    items = []
    for number, value in enumerate(values):
        if marks is not None and answers and answers[number] in ("reject", "ignore"):
            reader.note("texts without an accepted annotation are left out", f"in row {number}")
        else:
            mark = None if marks is None else marks[number]
            items.append(reader.sentence(f"in row {number}", value, mark, marks is not None))
    remarks = [f"{len(places):,} {text}, first {places[0]}" for text, places in reader.decisions.items()]
    other = next((unit for unit in UNITS if reader.misfits[unit] == 0 < reader.misfits["characters"]), None)
    return Sentences(items, split, marks is not None, remarks, other if offsets is None else None, column)


class _Reader:
    """Reads rows, and counts what it decides."""

    def __init__(
        self, split: str, column: str, label: str, names: Sequence[str] | None, offsets: Offsets | None, gold: bool
    ) -> None:
        self.split, self.column, self.label, self.class_names, self.gold = split, column, label, names, gold
        self.offsets, self.decisions = offsets, dict[str, list[str]]()
        self.misfits = dict.fromkeys(UNITS, 0)

    def note(self, text: str, line: str) -> None:
        self.decisions.setdefault(text, []).append(line)

    def refuse(self, problem: str, line: str, remedy: str, key: str = "") -> NoReturn:
        key, value = key or ("label" if self.gold else "teacher_spans"), self.column if key == "columns" else self.label
        raise UserError(f"task.{key}", value, f"split '{self.split}' has {problem}, {line}", remedy)

    def sentence(self, line: str, value: Any, mark: Any, is_labeled: bool) -> Sentence:
        lines = tuple(value.lines) if isinstance(value, WordLines) else ()
        line = f"in line {lines[0]}" if lines else line
        if is_labeled and mark is None:
            self.refuse("no labels", line, "Remove such rows. A text without entities has [] or tags of O.")
        try:
            is_text = isinstance(value, str) or not isinstance(value, list | tuple)
            words = [text_of(value)] if is_text else ["" if is_missing(word) else text_of(word) for word in value]
            (text := " ".join(words)).encode()
        except ValueError as error:
            problem = "half of a surrogate pair" if isinstance(error, UnicodeEncodeError) else str(error)
            remedy = "Repair or remove such rows: each needs a text, or a list of words."
            self.refuse(problem, line, remedy, "columns")
        if is_text:
            return Sentence(text, spans=None if mark is None else self.spans(text, mark, line), line=line)
        ends = np.cumsum([len(word) + 1 for word in words]).tolist()
        ranges = tuple((end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True))
        if not self.gold:
            return Sentence(text, ranges, None, self.spans(text, mark, line), line, lines)
        tags = None if mark is None else self.tags(mark, len(words), line)
        return Sentence(text, ranges, tags, line=line, lines=lines)

    def tags(self, mark: Any, num_words: int, line: str) -> tuple[str, ...]:
        if not isinstance(mark, list | tuple):
            self.refuse(f"a {type(mark).__name__} instead of a list of tags", line, "Tags are lists: ['O', 'B-PER'].")
        if any(isinstance(value, list | tuple | Mapping) for value in mark):
            self.refuse("spans in words", line, "Give each word a tag, or texts with spans in characters.")
        if len(mark) != num_words:
            self.refuse(f"{num_words} words with {len(mark)} tags", line, "Repair or remove such rows.")
        return tuple(self.tag(value, line) for value in mark)

    def tag(self, value: Any, line: str) -> str:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        if is_number and self.class_names is None:
            return str(int(value))
        if is_number and self.class_names is not None and 0 <= value < len(self.class_names):
            return self.class_names[int(value)]
        if isinstance(value, str) and value.strip():
            return value.strip()
        names = f": 0 to {len(self.class_names) - 1}" if self.class_names else ""
        self.refuse(f"the tag {value!r}", line, f"Every word needs a tag{names}.")

    def spans(self, text: str, mark: Any, line: str) -> tuple[Span, ...]:
        """Return the spans of a text, sorted, and without blanks at their ends.

        Raises:
            UserError: a span cannot be read, lies outside of the text, or overlaps another one.
        """
        marks = mark.get("entities") if isinstance(mark, Mapping) else mark
        if not isinstance(marks, list | tuple):
            problem = f"a {type(mark).__name__} instead of a list of tags or spans"
            self.refuse(problem, line, "Tags are lists, or lines of a .conll file; spans have start, end and label.")
        spans = set()
        for entry in marks:
            first, last, label, quote, score = self.raw_span(entry, line)
            begin, end = self.in_characters(text, first, last, quote, line)
            inner = text[begin:end]
            if not 0 <= begin < end <= len(text) or not inner.strip():
                other = next((unit for unit, fits in self.fitting(text, first, last).items() if fits), None)
                remedy = "Repair or remove it." if other is None else "It fits with " + override("task.offsets", other)
                self.refuse(f"a span {begin} to {end} of {len(text)} characters", line, remedy)
            for unit, fits in self.fitting(text, first, last).items():
                self.misfits[unit] += not fits and not quote.strip()
            if inner != inner.strip():
                self.note("spans have blanks at their ends, which are left out", line)
                begin += len(inner) - len(inner.lstrip())
                end -= len(inner) - len(inner.rstrip())
            spans.add(Span(begin, end, label, score))
        for span, following in pairwise(sorted(spans)):
            if following.begin < span.end and self.gold:
                both = " and ".join(f"{text[one.begin : one.end]!r} ({one.label})" for one in (span, following))
                self.refuse(f"spans that overlap, {both}", line, "A word has one label: keep one of the two.")
        return tuple(sorted(spans))

    def raw_span(self, entry: Any, line: str) -> tuple[int, int, str, str, float]:
        """Return begin, end and label of a span, its text in the data, empty if they give none, and its score."""
        score = np.nan
        try:
            (begin, end, label), quote = span_parts(entry), ""
            if isinstance(entry, Mapping):
                quote = entry.get("text") or ""
                for key in [key for key in entry if status_of("spans", key) == ("named", []) and self.gold]:
                    self.note(f"spans have the key {key}, which is not read", line)
                score = float(next((entry[key] for key in SCORES if key in entry and not self.gold), score))
            if not isinstance(label, str) or not label.strip() or label == OUTSIDE:
                raise ValueError(f"the label {label!r}")
            if not self.gold and not 0 <= score <= 1:
                raise ValueError(f"the {SCORES[0]} {score}")
            return int(begin), int(end), label.strip(), str(quote), score
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            problem = f"a span that cannot be read ({error}), {str(entry)[:60]}"
            self.refuse(problem, line, "Spans have start, end and one label, and a teacher's also a score from 0 to 1.")

    def fitting(self, text: str, begin: int, end: int) -> dict[Offsets, bool]:
        """Return whether a span has characters and cuts no word, by the unit of its offsets."""
        fits = dict[Offsets, bool]()
        for unit in UNITS:
            first, last = in_characters(text, begin, unit), in_characters(text, end, unit)
            edges = [text[place - 1 : place + 1] for place in (first, last) if 0 < place < len(text)]
            is_inside = 0 <= first < last <= len(text) and not text[first].isspace()
            fits[unit] = is_inside and not any(edge.isalnum() for edge in edges)
        return fits

    def in_characters(self, text: str, begin: int, end: int, quote: str, line: str) -> tuple[int, int]:
        """Return a span in characters, in the unit of the task or else that of its text."""
        units: tuple[Offsets, ...] = (self.offsets,) if self.offsets else tuple(UNITS)
        for unit in units:
            first, last = in_characters(text, begin, unit), in_characters(text, end, unit)
            if not quote.strip() or text[first:last].split() == quote.split():
                if self.offsets is None and unit != "characters":
                    self.note(f"spans count in {UNITS[unit]}, as their texts show", line)
                return first, last
        if self.offsets is None:
            problem = f"a span of {text[begin:end][:40]!r} whose text is {quote[:40]!r}"
            self.refuse(problem, line, "Repair or remove it.")
        self.note("spans have another text than the one that they name", line)
        return first, last


def span_parts(entry: Any) -> tuple[Any, Any, Any]:
    """Return begin, end and label of a span as annotation tools, pipelines of transformers and spaCy write it.

    Raises:
        KeyError, TypeError, ValueError: one of the three is missing, or there are several labels.
    """
    if isinstance(entry, Mapping):
        places = [entry[key if key in entry else f"{key}_offset"] for key in ("start", "end")]
        entry = *places, [entry[key] for key in LABEL_KEYS if key in entry]
    begin, end, label = entry
    while isinstance(label, list | tuple):
        (label,) = label
    return begin, end, label


def in_characters(text: str, place: int, unit: Offsets) -> int:
    """Return an offset in a text in characters; one that the text does not have stays as it is."""
    if unit == "utf16" and not text.isascii():  # JavaScript counts a character beyond the first 65,536 as two
        units = text.encode("utf-16-le")
        return len(units[: 2 * place].decode("utf-16-le", "replace")) if 0 <= 2 * place <= len(units) else place
    if unit == "newlines" and "\r\n" in text and 0 <= place <= len(text.replace("\r\n", "\n")):
        ends = [match.start() - number for number, match in enumerate(re.finditer("\r\n", text))]
        return place + bisect_left(ends, place)
    return place
