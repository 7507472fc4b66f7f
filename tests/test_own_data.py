"""Own data in the shapes that people have them in, each found and read as it lies there."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distill_runner.api import compose
from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.readers.dataset import parse_split, splits_overlap
from distill_runner.tasks import make_task

TEXTS = [f"text number {number}" for number in range(40)]
NAMES = ["good" if number % 4 else "bad" for number in range(40)]
ROWS = list(zip(TEXTS, NAMES, strict=True))


def task(dataset: Path, **fields: Any) -> Any:
    given = {"name": "own", "dataset": str(dataset), "metrics": ["accuracy"], "max_length": 32, "epochs": 1}
    return make_task(**given | {"validation": {"validation": "validation"}} | fields).resolved()


def table(path: Path, rows: list[tuple[str, str]], head: tuple[str, ...] = ("text", "label"), sep: str = ",") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=sep).writerows([head, *rows])
    return path


def two_files(folder: Path, suffix: str = ".csv", **how: Any) -> Path:
    folder.mkdir()
    table(folder / f"train{suffix}", ROWS[:30], **how)
    table(folder / f"dev{suffix}", ROWS[30:], **how)
    return folder


def lines(folder: Path) -> Path:
    folder.mkdir()
    for name, rows in (("train", ROWS[:30]), ("validation", ROWS[30:])):
        text = "\n".join(json.dumps({"id": number, "review": t, "class": n}) for number, (t, n) in enumerate(rows))
        (folder / f"{name}.jsonl").write_text(text + "\n")
    return folder


SHAPES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "two CSV files": (lambda place: two_files(place / "d"), {}),
    "semicolons": (lambda place: two_files(place / "d", sep=";"), {}),
    "tabs in .csv": (lambda place: two_files(place / "d", sep="\t"), {}),
    "TSV": (lambda place: two_files(place / "d", suffix=".tsv", sep="\t"), {}),
    "JSON lines with other names": (lambda place: lines(place / "d"), {}),
    "one CSV file": (lambda place: table(place / "all.csv", ROWS), {"split_off": 0.25}),
    "one file in parts": (
        lambda place: table(place / "all.csv", ROWS),
        {"train": "train[:30]", "validation": {"validation": "train[30:]"}},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_of_files_is_read_as_it_lies_there(tmp_path: Path, shape: str) -> None:
    make, fields = SHAPES[shape]
    found = task(make(tmp_path), **fields)
    assert len(found.columns) == 1
    assert found.labels == ["bad", "good"]
    train, validation = (found.examples(split) for split in (found.train, found.validation["validation"]))
    assert (len(train), len(validation)) == (30, 10)
    read = [*zip(train.texts[0], train.labels, strict=True), *zip(validation.texts[0], validation.labels, strict=True)]
    assert sorted((text, found.labels[label]) for text, label in read) == sorted(ROWS)


def test_a_part_that_is_split_off_is_drawn_and_the_same_every_time(tmp_path: Path) -> None:
    file = table(tmp_path / "all.csv", ROWS)
    texts = [task(file, split_off=0.25).examples("train[~~75%:]").texts[0] for _ in range(2)]
    assert texts[0] == texts[1] != TEXTS[30:]
    again = type(task(file, split_off=0.25))(**task(file, split_off=0.25).model_dump())
    assert (again.train, again.validation) == ("train[~~:75%]", {"validation": "train[~~75%:]"})
    assert sorted(parse_split("train[~~75%:]")[1].rows(8, ["a", None] * 4) % 2) == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"train": "train[:20]"}, r"divides a whole split .*there is task.train=train\[:20\]"),
        ({"validation": {"validation": "dev"}}, "there is task.train=train, task.validation.validation=dev"),
        ({"validation": {"a": "a", "b": "b"}}, "task.validation.a=a, task.validation.b=b"),
    ],
)
def test_a_split_off_beside_other_parts_is_refused(fields: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """One of both would have no effect: a user believed that a fifth of the rows was held out."""
    with pytest.raises(UserError, match=rf"task.split_off=0.2: .*{problem}"):
        task(two_files(tmp_path / "d"), split_off=0.2, **fields)


@pytest.mark.parametrize("train", ["*", "[dt]*"])
def test_two_splits_that_read_one_file_are_refused(train: str, tmp_path: Path) -> None:
    """``*`` has the files of validation too; a student was selected on rows that it was trained on."""
    folder = two_files(tmp_path / "d")
    own = task(folder, train=train, validation={"validation": "dev"})
    with pytest.raises(UserError, match=r"task.train=.*: reads dev.csv in .*, and so does task.validation.*=dev\n"):
        own.spec()
    assert task(folder, train="train[:10]", validation={"validation": "train[10:]"}).spec()


def test_a_corpus_is_not_validated_on_what_it_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one\n\ntwo\n")
    (tmp_path / "validation.txt").write_text("three\n")
    part = CorpusPart(dataset=str(tmp_path), columns=["text"], train="*", validation="validation")
    with pytest.raises(UserError, match=r"parts.*: reads validation.txt in .*, and so does parts.validation=v.*\n"):
        part.spec()
    with pytest.raises(UserError, match=r"parts.validation=train: has rows of the training split train\n"):
        CorpusPart(dataset=str(tmp_path), columns=["text"], validation="train")


@pytest.mark.parametrize(
    "split", ["train[0.5:]", "train[:0.9]", "train[.:]", "train[1.2.3:]", "train[-5:]", "train[a:b]"]
)
def test_a_part_that_is_none_is_refused(split: str, tmp_path: Path) -> None:
    """``train[0.5:]`` was all rows from row 0 on."""
    with pytest.raises(UserError, match=r"task.train=train\[.*: does not name a part: .*\n.*train\[:90%\] \(a share\)"):
        task(two_files(tmp_path / "d"), train=split)
    with pytest.raises(UserError, match="does not name a part"):
        task(two_files(tmp_path / "e"), train="train[:150%]")


@pytest.mark.parametrize(
    ("train", "other", "shared"),
    [
        ("train", "train", True),
        ("train", "validation", False),
        ("train[:90%]", "train[90%:]", False),
        ("train[:90%]", "train[80%:]", True),
        ("train[:90%]", "train", True),
        ("train[~:90%]", "train[~90%:]", False),
        ("train[~:90%]", "train[90%:]", True),
        ("train[:100]", "train[100:]", False),
        ("train[:100]", "train[99:]", True),
    ],
)
def test_nothing_is_judged_on_what_it_was_trained_on(tmp_path: Path, train: str, other: str, shared: bool) -> None:
    assert splits_overlap(train, other) == shared
    if shared:
        with pytest.raises(UserError, match=r"the model would be evaluated on training examples\n.*Take parts: "):
            task(tmp_path, train=train, validation={"validation": other})


def test_what_cannot_be_found_is_told(tmp_path: Path) -> None:
    file = tmp_path / "all.csv"
    table(file, [("a", "b", "c", "x")] * 9, head=("one", "text1", "text2", "label"))  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"could be one, text1 or text2\n  'task\.columns=\[text1,text2\]'$"):
        task(file, split_off=0.3)
    with pytest.raises(UserError, match=r"task.label=stars: no such column: the data have text, label\n"):
        task(table(tmp_path / "asked.csv", ROWS), label="stars", split_off=0.3)
    with pytest.raises(UserError, match=r"own.csv, which is one file\n.*task.split_off=0.1"):
        task(table(tmp_path / "own.csv", ROWS)).examples("validation")


def test_a_split_without_any_text_is_refused(tmp_path: Path) -> None:
    """A user whose column of texts is empty would train on nothing but the labels' frequencies."""
    file = table(tmp_path / "all.csv", [("  ", name) for _, name in ROWS])
    given = {"columns": ["text"], "labels": ["bad", "good"]}
    found = task(file, train="train", validation={"validation": "validation"}, **given)
    with pytest.raises(UserError, match=r"task.columns=\[text\]: all 40 texts of split 'train' are empty"):
        found.examples("train")


def test_balanced_weights_make_classes_count_the_same(tmp_path: Path) -> None:
    import torch

    found = task(table(tmp_path / "a.csv", ROWS), split_off=0.25, class_weights="balanced")
    labels = found.examples(found.train).labels
    counts = np.bincount(labels)
    np.testing.assert_allclose(found.class_weights, 30 / (2 * counts), rtol=1e-6)
    assert np.dot(found.class_weights, counts) == pytest.approx(30)
    logits = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch: Any = SimpleNamespace(labels=torch.from_numpy(labels), gold=torch.from_numpy(labels), output_weights=None)
    single = -logits.log_softmax(-1)[torch.arange(30), batch.labels]
    expected = sum(single[batch.labels == c].mean() / 2 for c in (0, 1))
    assert found.outputs.label_loss(logits, batch).item() == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(UserError, match="must be balanced, or 2 numbers"):
        task(tmp_path / "a.csv", split_off=0.25, class_weights=[1.0, 2.0, 3.0])


def test_own_tasks_are_named_by_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.csv").touch()
    names = {"reviews": "reviews", "data/of 2026/": "of_2026", "one.csv": "one", "copies/rte": "own_rte"}
    for dataset, name in names.items():
        task = compose("task=custom", f"task.dataset='{dataset}'").stages["student"].task
        assert task is not None
        assert task.name == name


def test_numbers_are_no_classes_of_another_split(tmp_path: Path) -> None:
    """0, 1, 2 in MNLI's order became the classes of the training split in the order of the alphabet."""
    folder = tmp_path / "d"
    folder.mkdir()
    names = ["entailment", "neutral", "contradiction"]
    table(folder / "train.csv", [(text, names[number % 3]) for number, text in enumerate(TEXTS)])
    table(folder / "validation.csv", [(text, str(number % 3)) for number, text in enumerate(TEXTS)])
    with pytest.raises(UserError, match=r"split 'validation' has numbers such as 0, and split 'train' names\n"):
        task(folder)
    assert task(folder, labels=names).examples("validation").labels.tolist() == [n % 3 for n in range(40)]
    for value, message in ((0, "has numbers such as 0"), (False, r"(?s)has the answer 'False'.*=\['?odd'?,.False")):
        rows = [{"text": text, "label": "ab"[row % 2], "a": value if row else "odd"} for row, text in enumerate(TEXTS)]
        (tmp_path / f"{value}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(UserError, match=message):  # an answer is no index either
            task(tmp_path / f"{value}.jsonl", split_off=0.25, answers=["a"], no_answer=["odd"]).training_scores(None)


def test_validation_splits_may_share_rows_and_tests_may_not(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "d")
    table(folder / "test.csv", ROWS[:5])
    validation = {"validation": "dev", "first": "dev[:5]"}
    assert task(folder, validation=validation, test={"test": "test?"}).test == {"test": "test"}
    assert task(folder, validation=validation).spec()
    everything = task(folder, train="*", split_off=0.1, test={"test": "test?"})
    assert everything.test == {}, "the rows of an optional test split are trained on"
    with pytest.raises(UserError, match=r"task.test.test=test: reads test.csv in .*, and so does task.train=\*"):
        task(folder, train="*", split_off=0.1, test={"test": "test"}).spec()
