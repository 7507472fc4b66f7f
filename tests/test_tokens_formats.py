"""Made sentences with entities, written in every form that is read: the same words, tags and entities come back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.tasks import make_task

SCHEMES = ("bio", "iob1", "bioes", "bilou", "plain")
PREFIXES = {"bioes": "SBIE", "bilou": "UBIL"}
Entity = tuple[int, int, str]
"""First word, last word + 1, and type."""


@dataclass(frozen=True)
class Made:
    """A sentence: its words, and its entities in order."""

    words: list[str]
    entities: list[Entity]

    def tags(self, scheme: str) -> list[str]:
        tags = ["O"] * len(self.words)
        for begin, end, kind in self.entities:
            single, first, inner, last = list(PREFIXES.get(scheme, "BBII"))
            prefixes = [single] if end - begin == 1 else [first, *[inner] * (end - begin - 2), last]
            if scheme == "iob1":
                touches = begin > 0 and tags[begin - 1].partition("-")[2] == kind
                prefixes = ["B" if touches else "I", *"I" * (end - begin - 1)]
            tags[begin:end] = [kind if scheme == "plain" else f"{prefix}-{kind}" for prefix in prefixes]
        return tags


LETTERS = "abzÄé\u4f60\U0001f642#-'\",.1O"
WORDS = st.one_of(
    st.text(st.sampled_from(LETTERS), min_size=1, max_size=5),
    st.sampled_from(["#", "#end", "#b", "B-x", "O", "_", "e\u0301", "\u200b", "-", "a\u2028b", "a\x85b"]),
)
TYPES = ["PER", "LOC", "A-B"]
FIRST = Made(["the", "dog", "Ann", "Lee", "and", "Oslo", "Rome", "ran", "up"],
             [(1, 2, "A-B"), (2, 4, "PER"), (5, 6, "LOC"), (6, 7, "LOC")])  # fmt: skip
"""First sentence of every file, with all types."""


@st.composite
def sentences(draw: st.DrawFn, words: st.SearchStrategy[str], types: Sequence[str] = tuple(TYPES)) -> Made:
    chunks = draw(st.lists(st.tuples(st.sampled_from([None, *types]), st.integers(1, 3)), min_size=1, max_size=6))
    entities, position = [], 0
    for kind, size in chunks:
        if kind:
            entities.append((position, position + size, kind))
        position += size
    return Made(draw(st.lists(words, min_size=position, max_size=position)), entities)


def merged(entities: Sequence[Entity]) -> list[Entity]:
    """Entities of plain tags: neighbors of one type are one entity."""
    joined: list[Entity] = []
    for begin, end, kind in entities:
        if joined and joined[-1][1:] == (begin, kind):
            begin = joined.pop()[0]
        joined.append((begin, end, kind))
    return joined


def files(scheme: str) -> st.SearchStrategy[list[Made]]:
    return st.lists(sentences(WORDS), max_size=4).map(lambda rows: [FIRST, *rows])


@st.composite
def conll(draw: st.DrawFn, rows: Sequence[Made], scheme: str) -> tuple[str, bytes]:
    """The extension and the content of a file: 2 to 5 columns, tabs or blanks, comments, documents and line ends."""
    extensions = [".conll", ".bio", ".iob"] + ([] if scheme == "plain" else [".txt", ".tsv"])
    extension = draw(st.sampled_from(extensions))
    count = draw(st.integers(2, 5))
    separator = draw(st.sampled_from(["\t", " ", "  ", " \t"] if count > 2 else ["\t", " ", "  "]))
    if separator == " \t":
        separator = "\t"
    has_trailing, has_documents, has_comments = (draw(st.booleans()) for _ in range(3))
    lines = []
    for number, row in enumerate(rows):
        if has_documents and number % 2 == 0:
            document = draw(st.sampled_from(["-DOCSTART-", "-DOCSTART- (1)"]))
            lines += [separator.join([document, *["-X-"] * (count - 2), "O"]), ""]
        if has_comments:
            lines.append(draw(st.sampled_from(["# sent_id = 3", "# newdoc", "# text = the dog, ran", "#"])))
        for word, tag in zip(row.words, row.tags(scheme), strict=True):
            columns = [word, *draw(st.sampled_from([["NN", "I-NP", "_"], ["DT", "O", "1"]]))[: count - 2], tag]
            lines.append(separator.join(columns) + ("  " if has_trailing else ""))
        lines += [""] * draw(st.integers(1, 2))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = draw(st.sampled_from(["", "\ufeff"])) + newline.join(lines).rstrip() + draw(st.sampled_from(["", newline]))
    return extension, text.encode()


def task_of(folder: Path, **fields: Any) -> Any:
    base = {"type": "tokens", "metrics": ["f1"], "epochs": 1, "validation": {"v": "validation"}, "test": {}}
    return make_task(**{"name": "own", "dataset": str(folder), **base, **fields}).resolved()


def read(task: Any, split: str = "train") -> list[Made]:
    """What a task reads: words, with the entities of their tags."""
    examples = task.examples(split)
    tags, bounds = examples.tag_arrays(task.tagset)
    rows = [Made(sentence.word_texts(), []) for sentence in examples.items]
    for begin, end, kind in task.tagset.entities(tags, bounds).tolist():
        number = int(np.searchsorted(bounds, begin, side="right")) - 1
        first = int(bounds[number])
        rows[number].entities.append((begin - first, end - first, task.tagset.type_names[kind]))
    return rows


def expected(rows: Sequence[Made], scheme: str) -> list[Made]:
    return [Made(row.words, merged(row.entities)) if scheme == "plain" else row for row in rows]


def assert_read(task: Any, rows: Sequence[Made], scheme: str) -> None:
    assert read(task) == expected(rows, scheme)
    assert [list(sentence.tags) for sentence in task.examples("train").items] == [row.tags(scheme) for row in rows]
    assert task.scheme == {"bilou": "bioes"}.get(scheme, scheme)


@settings(max_examples=40)
@given(st.data())
def test_conll(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    rows = data.draw(files(scheme))
    extension, content = data.draw(conll(rows, scheme))
    with TemporaryDirectory() as folder:
        for split in ("train", "validation"):
            (Path(folder) / f"{split}{extension}").write_bytes(content)
        assert_read(task_of(Path(folder)), rows, scheme)


NAMES = st.sampled_from([("tokens", "ner_tags"), ("words", "tags"), ("tokens", "labels"), ("pieces", "marks")])


@settings(max_examples=25)
@given(st.data())
def test_words_and_tags(data: st.DataObject) -> None:
    """With names or numbers of tags; words may be empty or hold blanks."""
    scheme = data.draw(st.sampled_from(SCHEMES))
    words = st.one_of(WORDS, st.sampled_from(["", " ", "New York", "\n"]))
    rows = [FIRST, *data.draw(st.lists(st.one_of(sentences(words), st.just(Made([], []))), max_size=4))]
    column, label = data.draw(NAMES)
    form = data.draw(st.sampled_from(["names", "numbers"]))
    tags = [row.tags(scheme) for row in rows]
    names = sorted({tag for row in tags for tag in row})
    fields: dict[str, Any] = {"columns": [column], "label": label} if column == "pieces" else {}
    if form == "numbers":
        fields |= {"labels": names}
        values: list[Any] = [[names.index(tag) for tag in row] for row in tags]
    else:
        values = tags
    with TemporaryDirectory() as folder:
        for split in ("train", "validation"):
            path = Path(folder) / split
            lines = [
                json.dumps({"id": number, column: row.words, label: value}, ensure_ascii=number % 2 == 0)
                for number, (row, value) in enumerate(zip(rows, values, strict=True))
            ]
            path.with_suffix(".jsonl").write_text("\n".join(lines), encoding="utf-8")
        assert_read(task_of(Path(folder), **fields), rows, scheme)


@settings(max_examples=25)
@given(data=st.data())
def test_spans(data: st.DataObject, wordpiece: Any) -> None:
    """Spans of four tools, in characters or UTF-16 units, come back from the tags of the tokenizer's own words."""
    words = st.text(st.sampled_from("abzé\u4f60\U0001f642-,.1"), min_size=1, max_size=5)
    rows = [FIRST, *data.draw(st.lists(sentences(words), max_size=4))]
    form = data.draw(st.sampled_from(["spacy", "doccano", "entities", "label studio"]))
    blank = data.draw(st.sampled_from([" ", "  ", "\n", "\u00a0"]))
    has_units = data.draw(st.booleans())
    texts = [blank.join(row.words) for row in rows]
    spans = [spans_of(row, blank) for row in rows]
    lines = []
    for text, own in zip(texts, spans, strict=True):
        marks = [(units(text, b) if has_units else b, units(text, e) if has_units else e, k) for b, e, k in own]
        quotes = [text[b:e] for b, e, _ in own]
        lines.append(json.dumps(exported(form, text, marks, quotes)))
    fields = {"offsets": "utf16"} if has_units else {"offsets": "characters"}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "validation"):
            (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        task = task_of(folder, **fields)
        examples = task.examples("train")
        assert [sentence.text for sentence in examples.items] == texts
        read_spans = [[(span.begin, span.end, span.label) for span in sentence.spans] for sentence in examples.items]
        assert read_spans == spans
        (folder / "pieces").mkdir()
        task.write(folder / "pieces", examples, wordpiece)
        split = task.open(folder / "pieces")
        again = map(
            json.loads, task.prediction_file(np.eye(len(task.labels))[split.tags], split, examples, "", {}).splitlines()
        )
        assert [[(span["start"], span["end"], span["label"]) for span in line["spans"]] for line in again] == spans


def spans_of(row: Made, blank: str) -> list[Entity]:
    begins = np.cumsum([0, *(len(word) + len(blank) for word in row.words)]).tolist()
    return [(begins[b], begins[e - 1] + len(row.words[e - 1]), kind) for b, e, kind in row.entities]


def units(text: str, position: int) -> int:
    return len(text[:position].encode("utf-16-le")) // 2


def exported(form: str, text: str, marks: Sequence[Entity], quotes: Sequence[str]) -> dict[str, Any]:
    if form == "spacy":
        return {"text": text, "spans": [{"start": b, "end": e, "label": k} for b, e, k in marks]}
    if form == "doccano":
        return {"text": text, "label": [list(mark) for mark in marks]}
    if form == "entities":
        return {"text": text, "entities": [{"start_offset": b, "end_offset": e, "label": k} for b, e, k in marks]}
    labels = [
        {"start": b, "end": e, "labels": [k], "text": quote} for (b, e, k), quote in zip(marks, quotes, strict=True)
    ]
    return {"text": text, "label": labels}


@pytest.mark.parametrize("text", ["the DT\n#rome HT\nis VB\n", "the\tDT\n#rome\tHT\nis\tVB\n"])
def test_a_word_with_a_hash_and_a_tag_is_no_comment(tmp_path: Path, text: str) -> None:
    """Words of tweets begin so; a comment has a blank after it, or another number of columns."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.conll").write_text(text)
    assert task_of(tmp_path, metrics=["accuracy"]).labels == ["DT", "HT", "VB"]
