"""Labels of words as people have them in files: read right and said, or refused in two lines that name the line."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.tasks import make_task
from distill_runner.tasks.split_account import data_line

Lines = Sequence[str]


def task_of(folder: Path, **fields: Any) -> Any:
    base = {"type": "tokens", "metrics": None, "epochs": 1, "validation": {"validation": "validation"}, "test": {}}
    return make_task(**{"name": "own", "dataset": str(folder), **base, **fields}).resolved()


def words_and_tags(task: Any, split: str = "train") -> list[list[tuple[str, str]]]:
    items = task.examples(split).items
    return [list(zip(item.word_texts(), item.tags or [None] * 99, strict=False)) for item in items]


def labels_of(task: Any, tokenizer: Any, folder: Path, split: str = "train") -> list[dict[str, str]]:
    """The words that are not outside, with their tags, as a tokenizer divides the texts."""
    examples = task.examples(split)
    folder.mkdir()
    task.write(folder, examples, tokenizer)
    words = task.open(folder)
    names = task.tagset.names
    return [
        {
            examples.items[number].text[words.begins[word] : words.ends[word]]: names[words.tags[word]]
            for word in range(words.bounds[number], words.bounds[number + 1])
            if words.tags[word] != task.tagset.outside
        }
        for number in range(len(examples))
    ]


def line_of(task: Any, split: str = "train") -> str:
    with recorded_tables() as tables:
        examples = task.examples(split)
    line = data_line({"train": task.account(split, examples, tables)}, {}, "text")
    return " ".join([str(line), *line.warnings])


CONLL = ["the O", "New B-LOC", "York I-LOC", "dog O", "", "Ann B-PER", "ran O"]


def save(folder: Path, train: str, validation: str | None = None, name: str = "{}.conll") -> Path:
    folder.mkdir(exist_ok=True)
    for split, text in (("train", train), ("validation", train if validation is None else validation)):
        (folder / name.format(split)).write_bytes(text.encode())
    return folder


EXPECTED = [[("the", "O"), ("New", "B-LOC"), ("York", "I-LOC"), ("dog", "O")], [("Ann", "B-PER"), ("ran", "O")]]


def four_columns() -> str:
    """CoNLL-2003: word, part of speech, chunk and name; documents begin with -DOCSTART-."""
    rows = [f"{word} NN B-NP {tag}" for word, tag in (line.split() for line in CONLL if line)]
    return "\n".join(["-DOCSTART- -X- -X- O", "", *rows[:4], "", *rows[4:], ""])


CONLL_FILES: dict[str, tuple[str, str]] = {
    "four columns": (four_columns(), "{}.txt"),
    "tags first": ("\n".join(" ".join(line.split()[::-1]) for line in CONLL), "{}.txt"),
}


@pytest.mark.parametrize("name", CONLL_FILES)
def test_conll_files_are_read(name: str, tmp_path: Path) -> None:
    text, files = CONLL_FILES[name]
    task = task_of(save(tmp_path / "own", text, name=files))
    assert words_and_tags(task) == EXPECTED
    assert task.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    assert task.scheme == "bio"
    said = line_of(task)
    assert "ner_tags (BIO) (LOC 1, PER 1)" in said
    assert "6 words" in said


@pytest.mark.parametrize("form", ["{} {} {}", "{} NN {} {}", "{} NN B-NP {} {}"])
def test_predictions_beside_gold_tags_are_not_taken_for_them(form: str, tmp_path: Path) -> None:
    """The files of conlleval and flair were read by their last column, which is a model's."""
    rows = [form.format(*line.split(), "B-LOC") if line else "" for line in CONLL]
    with pytest.raises(UserError, match=r"could be gold or prediction\n.*task\.label=gold"):
        task_of(save(tmp_path / "own", "\n".join(rows)))
    assert words_and_tags(task_of(tmp_path / "own", label="gold")) == EXPECTED


@pytest.mark.parametrize("start", [0, 1])
def test_a_column_that_counts_the_words_is_refused(start: int, tmp_path: Path) -> None:
    rows = [f"{number} {' '.join(word)}" for row in EXPECTED for number, word in enumerate(row, start)]
    rows.insert(len(EXPECTED[0]), "")
    with pytest.raises(UserError, match=f"has {start}, {start + 1}, .* in its first column"):
        task_of(save(tmp_path, "\n".join(rows)))


def test_tags_that_do_not_fit_are_told_with_their_line(tmp_path: Path) -> None:
    rows = ["New B-LOC", "York I-LOC", "", "a O", "Ann I-PER", "", "Bob B-PER"]
    said = line_of(task_of(save(tmp_path / "own", "\n".join(rows))))
    assert "1 tags of train do not fit BIO, first I-PER in line 5" in said


def test_a_type_only_in_validation_is_refused(tmp_path: Path, wordpiece: Any) -> None:
    task = task_of(save(tmp_path / "own", "\n".join(CONLL), "a O\nCup B-EVENT"))
    with pytest.raises(UserError) as refusal:
        labels_of(task, wordpiece, tmp_path / "tokens", "validation")
    assert "split 'validation' has B-EVENT, which is not among the labels, in line 2" in str(refusal.value)
    labels = next(part for part in shlex.split(str(refusal.value)) if part.startswith("task.labels="))
    names = labels.removeprefix("task.labels=").strip("[]").split(",")
    again = task_of(tmp_path / "own", labels=names)
    assert labels_of(again, wordpiece, tmp_path / "again", "validation") == [{"Cup": "B-EVENT"}]


TEXT = "\U0001f642\U0001f642 Ann from New York "


def rows_of(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


ANN = {"text": TEXT, "spans": [{"start": 3, "end": 6, "label": "PER"}]}


def test_the_tree_of_label_studio_is_refused_with_the_export_that_is_read(tmp_path: Path) -> None:
    row = {"id": 7, "data": {"review": TEXT, "source": "mail"}, "annotations": [{"result": []}]}
    with pytest.raises(UserError, match=r"review, source\n.*JSON-MIN.*task\.columns=\[review\]"):
        task_of(save(tmp_path / "own", rows_of([row]), name="{}.jsonl"))


@pytest.mark.parametrize("row", [{"tokens": ["Ann", "ran"], "ner_tags": None}, {"text": "Ann ran", "spans": None}])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_row_without_labels_is_refused(row: dict[str, Any], split: str, tmp_path: Path) -> None:
    """It was read as a sentence without entities, in training and in the score."""
    good = {"tokens": ["Ann", "ran"], "ner_tags": ["B-PER", "O"]} if "tokens" in row else ANN
    texts = {"train": rows_of([good]), "validation": rows_of([good])} | {split: rows_of([good, row])}
    with pytest.raises(UserError, match=f"split '{split}' has no labels, in row 1"):
        task_of(save(tmp_path / "own", texts["train"], texts["validation"], "{}.jsonl")).examples(split)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"tokens": ["a", "b"], "tags": ["X", "Y"], "labels": ["B-A", "O"]}, "tags or labels"),
        ({"text": "a b", "label": [[0, 1, "A"]], "entities": [[0, 1, "B"]]}, "label or entities"),
        (
            {"text": "a b", "spans": [[0, 1, "A"]], "labels": [[0, 1, "B"]], "entities": []},
            "spans or labels or entities",
        ),
    ],
)
def test_two_columns_of_labels_are_refused_with_both_named(row: dict[str, Any], names: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"task.label: could be {names}"):
        task_of(save(tmp_path / "own", rows_of([row]), name="{}.jsonl"))


def test_prodigy_with_its_tokens(tmp_path: Path) -> None:
    row = ANN | {"tokens": [{"text": "Ann", "start": 0, "end": 3, "id": 0}], "answer": "accept"}
    task = task_of(save(tmp_path / "own", rows_of([row]), name="{}.jsonl"))
    assert (task.columns, task.label) == (["text"], "spans")


@pytest.mark.parametrize("form", [repr, json.dumps, lambda items: "[" + " ".join(map(repr, items)) + "]"])
def test_printed_lists_of_words(form: Callable[[list[str]], str], tmp_path: Path) -> None:
    """As to_csv of datasets and pandas writes them."""
    import csv
    import io

    file = io.StringIO()
    words, tags = ["Ann's", "dog"], ["B-PER", "O"]
    csv.writer(file).writerows([["tokens", "ner_tags"], [form(words), form(tags)]])
    task = task_of(save(tmp_path / "own", file.getvalue(), name="{}.csv"))
    assert words_and_tags(task) == [list(zip(words, tags, strict=True))]


@pytest.mark.parametrize(
    ("marks", "problem"),
    [
        ([[0, 3, "A"], [2, 5, "B"]], r"spans that overlap, 'the' \(A\) and 'e d' \(B\), in row 0"),
        ([[0, 99, "A"]], r"a span 0 to 99 of 11 characters, in row 0"),
        ([[0, 2, "A"]], r"the span 'th', which cuts the word 'the', in row 0"),
        ([[0, "A"]], r"a span that cannot be read"),
        ([{"start": 0, "end": 3, "label": "A", "text": "dog"}], r"a span of 'the' whose text is 'dog', in row 0"),
        ("A", r"a str instead of a list of tags or spans, in row 0"),
    ],
)
def test_spans_that_fit_no_text_are_refused(marks: Any, problem: str, tmp_path: Path, wordpiece: Any) -> None:
    rows = [{"text": "the dog ran", "spans": marks}, {"text": "a", "spans": []}]
    save(tmp_path / "own", "\n".join(map(json.dumps, rows)), name="{}.jsonl")
    with pytest.raises(UserError, match=problem) as refusal:
        labels_of(task_of(tmp_path / "own"), wordpiece, tmp_path / "tokens")
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "unit"),
    [("\U0001f600\U0001f600 Ann lives in Rome", "utf16"), ("one\r\nand two\r\nAnn lives in Rome", "newlines")],
)
def test_offsets_in_other_units_are_named(text: str, unit: str, tmp_path: Path, wordpiece: Any) -> None:
    def unit_length(part: str) -> int:
        return len(part.encode("utf-16-le")) // 2 if unit == "utf16" else len(part.replace("\r\n", "\n"))

    words = ("Ann", "Rome")
    starts = {word: text.index(word) for word in words}
    spans = [[unit_length(text[:start]), unit_length(text[: start + len(word)])] for word, start in starts.items()]
    for named, remedy in ((spans, f"task.offsets={unit}"), ([[*spans[0]], [spans[1][0], 99]], "Repair")):
        rows = [{"text": text, "spans": [[*span, "A"] for span in named]}, {"text": "a", "spans": []}]
        save(tmp_path / "own", "\n".join(map(json.dumps, rows)), name="{}.jsonl")
        with pytest.raises(UserError, match=remedy):
            labels_of(task_of(tmp_path / "own"), wordpiece, tmp_path / remedy)
    rows = [{"text": text, "spans": [[*span, "A"] for span in spans]}, {"text": "a", "spans": []}]
    save(tmp_path / "own", "\n".join(map(json.dumps, rows)), name="{}.jsonl")
    read = labels_of(task_of(tmp_path / "own", offsets=unit), wordpiece, tmp_path / "read")
    assert read[0] == {"Ann": "B-A", "Rome": "B-A"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "2 words with 1 tags, in row 0"),
        ({"tokens": ["a"], "ner_tags": [None]}, "the tag None, in row 0"),
        ({"tokens": ["a", "b"], "ner_tags": [[0, 1, "PER"]]}, "spans in words, in row 0"),
        ({"tokens": ["a", "b", "c"], "ner_tags": ["B-A", "E-A", "U-A"]}, "of several schemes: B, E, U"),
        ({"tokens": ["a"], "ner_tags": "O"}, "cannot be inferred|instead of a list of tags"),
        ({"tokens": ["a"], "ner_tags": [3]}, "are numbers without names"),
        ({"tokens": ["a"], "ner_tags": ["0.8"]}, "are numbers without names"),
        ({"words": "a b", "tags": "O O"}, "a str instead of a list of tags or spans, in row 0"),
        ({"tokens": [{"text": "a"}], "ner_tags": ["O"]}, "a dict instead of a text, in row 0"),
        ({"tokens": ["a", "b", "c"], "ner_tags": ["B", "I", "O"]}, "without a prefix in front of a type, such as [BI]"),
        ({"tokens": ["a", "b"], "ner_tags": ["B_X", "O"]}, "without a prefix in front of a type, such as B_X"),
    ],
)
def test_rows_that_do_not_fit_are_refused(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem) as refusal:
        task_of(save(tmp_path / "own", json.dumps(row) + "\n" + json.dumps(row), name="{}.jsonl"))
    assert len(str(refusal.value).splitlines()) <= 2


def test_parts_of_speech_need_accuracy(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", "the DT\ndog NN\n\na DT")
    with pytest.raises(UserError, match=r"task\.metrics=f1: counts entities, but the labels have no O"):
        task_of(folder)
    assert task_of(folder, metrics=["accuracy"]).scheme == "plain"


def test_conll_u(tmp_path: Path) -> None:
    rows = ["# text = the dog", "1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_", "2-3\tdont\t_\t_\t_\t_\t_\t_\t_\t_"]
    rows += ["2\tdo\tdo\tAUX\t_\t_\t0\troot\t_\t_", "3\tn't\tnot\tPART\t_\t_\t2\tx\t_\t_", ""]
    task = task_of(save(tmp_path / "own", "\n".join(rows), name="{}.conllu"), metrics=["accuracy"])
    assert words_and_tags(task) == [[("the", "DET"), ("do", "AUX"), ("n't", "PART")]]


def test_a_test_split_has_all_labels_or_none(tmp_path: Path) -> None:
    """One row without labels had taken those of all others away."""
    folder = save(tmp_path / "own", json.dumps({"tokens": ["a", "b"], "ner_tags": ["O", "B-x"]}), name="{}.jsonl")
    rows = [{"tokens": ["a", "b"], "ner_tags": tags} for tags in (["O", "B-x"], None)]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = task_of(folder, test={"test": "test"})
    with pytest.raises(UserError, match="row 1"):
        task.examples("test")
    (folder / "test.jsonl").write_text(json.dumps(rows[1]) + "\n" + json.dumps(rows[1]))
    assert task_of(folder, test={"test": "test"}).examples("test").items[0].tags is None
