"""Multi-label classification: what is read, lost, taught and scored, and a run from a file to predictions."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.datasets.readers.content import SplitTable
from distill_runner.methods.base import Progress
from distill_runner.methods.outputs import LabelSets
from distill_runner.methods.predictions import SoftLabels, SoftLabelsPerClass
from distill_runner.models.features import Features
from distill_runner.tasks import make_task
from helpers.command import distill_run

SAID = {"soup": "food", "waiter": "service", "bill": "price"}
TEXTS = ["the soup and the bill", "a waiter", "nothing at all", "the bill , the waiter and the soup"] * 6
LABELS = [sorted(label for word, label in SAID.items() if word in text) for text in TEXTS]
NAMES = ["food", "price", "service"]


def flags(path: Path) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", *NAMES])
        rows.writerows([text, *(int(name in own) for name in NAMES)] for text, own in zip(TEXTS, LABELS, strict=True))
    return path


def lists(path: Path) -> Path:
    rows = (json.dumps({"text": text, "labels": own}) for text, own in zip(TEXTS, LABELS, strict=True))
    path.write_text("\n".join(rows) + "\n")
    return path


def joined(path: Path) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "labels"])
        rows.writerows(zip(TEXTS, map(" ; ".join, LABELS), strict=True))
    return path


def saved(path: Path) -> Path:
    import datasets

    codes = [[NAMES.index(label) for label in own] for own in LABELS]
    features = datasets.Features(
        {"text": datasets.Value("string"), "labels": datasets.List(datasets.ClassLabel(names=NAMES))}
    )
    datasets.Dataset.from_dict({"text": TEXTS, "labels": codes}, features).save_to_disk(path)
    return path


SHAPES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "flags.csv": (flags, {"label": NAMES}),
    "lists.jsonl": (lists, {}),
    "joined.csv": (joined, {"separator": "semicolon"}),
    "saved": (saved, {}),
}


def task(dataset: Path, **fields: Any) -> Any:
    given = {"name": "own", "type": "multilabel", "dataset": str(dataset), "metrics": None, "max_length": 32}
    split = {"validation": {"validation": "validation"}, "split_off": 0.25, "epochs": 1}
    return make_task(**given | split | fields).resolved()


@pytest.mark.parametrize(("option", "value"), [("separator", "comma"), ("flags", True)])
def test_columns_of_labels_have_no_lists_to_divide(tmp_path: Path, option: str, value: Any) -> None:
    """The option would do nothing, while the user believes that it does."""
    with pytest.raises(UserError, match=f"task.{option}={str(value).lower()}: is read for a column of lists"):
        task(flags(tmp_path / "d.csv"), label=["food", "price"], **{option: value})


@pytest.mark.parametrize("shape", SHAPES)
def test_labels_are_read_as_they_lie_there(tmp_path: Path, shape: str) -> None:
    make, fields = SHAPES[shape]
    found = task(make(tmp_path / shape), **fields)
    assert (found.columns, found.labels, found.metrics) == (["text"], NAMES, ["f1_micro"])
    parts = [found.examples(split) for split in (found.train, found.validation["validation"])]
    assert [len(part) for part in parts] == [18, 6]
    read = {text: row.tolist() for part in parts for text, row in zip(part.texts[0], part.labels, strict=True)}
    assert read == {text: [name in own for name in NAMES] for text, own in zip(TEXTS, LABELS, strict=True)}


@pytest.mark.parametrize(
    ("make", "fields", "said"),
    [
        (joined, {}, r"task.label=labels: split 'train.*' holds .* which is not a list of labels"),
        (flags, {"label": ["food", "text"], "columns": ["price"]}, "in a column of 0 and 1"),
        (flags, {"label": ["food", "text"], "columns": ["text"]}, "the column 'text' holds the label"),
        (flags, {"label": NAMES, "labels": ["one", "other"]}, "names 2 labels, but task.label names 3 columns"),
        (lists, {"labels": ["food", "price"]}, "has the label service, which is not among these labels"),
        (lists, {"labels": ["food"]}, "needs two classes or more"),
        (lists, {"metrics": ["accuracy"]}, "task.type=multilabel has no such metric\n.*f1_micro"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, make: Any, fields: dict[str, Any], said: str) -> None:
    file = make(tmp_path / ("d.jsonl" if make is lists else "d.csv"))

    def read() -> None:
        found = task(file, **fields)
        found.examples(found.train)

    with pytest.raises(UserError, match=said):
        read()


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_that_no_label_has_is_refused(tmp_path: Path, number: int) -> None:
    found = task(saved(tmp_path / "data"))
    whole = SplitTable({"labels": []}, NAMES)
    with pytest.raises(UserError, match=f"split 'train' has the label number {number}, .* 0 to 2\n"):
        found.encode([[0], [1, number]], whole, "train")


def test_a_file_with_one_number_in_each_row_has_one_label_in_each(tmp_path: Path) -> None:
    """Such a file is read as a column of numbers, not of texts."""
    (tmp_path / "train.csv").write_text("text,labels\na,1;2\nb,3\n")
    (tmp_path / "validation.csv").write_text("text,labels\nc,2\nd,3\n")
    found = task(tmp_path, label="labels", columns=["text"], separator="semicolon")
    assert found.labels == ["1", "2", "3"]
    assert found.examples("validation").labels.tolist() == [[0, 1, 0], [0, 0, 1]]


def test_lists_of_one_number_each_are_no_flags(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"text {number}", "labels": [number % 2]}) for number in range(8)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows) + "\n")
    found = task(tmp_path / "d.jsonl")
    assert found.labels == ["0", "1"]
    assert {tuple(row) for row in found.examples(found.train).labels.tolist()} == {(1, 0), (0, 1)}


def test_losses_are_those_of_bernoulli_variables() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    labels = (torch.rand(5, 3, generator=generator) > 0.5).float()
    batch: Any = SimpleNamespace(labels=labels, gold=labels, output_weights=None)
    p = 1 / (1 + np.exp(-student.numpy()))
    expected = -np.where(labels.numpy() > 0, np.log(p), np.log(1 - p)).mean()
    assert LabelSets().label_loss(student, batch).item() == pytest.approx(expected, rel=1e-12)
    term = SoftLabels(temperature=3.0)
    term.outputs = LabelSets()
    student.requires_grad_()
    loss = term(Features(student), Features(teacher), batch, Progress(0, 0, 1, 1))
    p, q = (1 / (1 + np.exp(-values.detach().numpy() / 3)) for values in (teacher, student))
    divergence = 9 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    assert loss.item() == pytest.approx(divergence, rel=1e-9)
    per_class = SoftLabelsPerClass(temperature=3.0)  # it is a mean over the labels already
    per_class.outputs = LabelSets()
    assert per_class(Features(student), Features(teacher), batch, Progress(0, 0, 1, 1)).item() == loss.item()
    assert torch.autograd.gradcheck(lambda z: LabelSets().soft_label_loss(z, teacher, batch, 3.0), student)


def test_right_and_wrong_by_hand(tmp_path: Path) -> None:
    judged = task(lists(tmp_path / "d.jsonl"))
    logits, labels = np.log([[3.0, 1 / 4, 1.0], [1 / 3, 1 / 9, 1 / 4]]), np.array([[1.0, 0, 1], [0, 0, 0]])
    found = judged.example_predictions(logits, SimpleNamespace(labels=labels))
    assert found.correct.tolist() == [False, True]
    (warning,) = judged.prediction_warnings(logits, SimpleNamespace(labels=labels))
    assert warning.startswith("the student never predicts service: no probability")
    (warning,) = judged.prediction_warnings(logits - 9, SimpleNamespace(labels=labels))
    assert warning.startswith("the student predicts no label: ")
    np.testing.assert_allclose(found.label_probability, [0.75 * 0.8 * 0.5, 0.75 * 0.9 * 0.8])
    assert [found.prediction_text(number) for number in (0, 1)] == ["food (0.3000)", "no label (0.5400)"]
    assert [found.label_text(number) for number in (0, 1)] == ["food;service", "no label"]


def test_a_file_becomes_a_student_that_names_its_labels(
    tmp_path: Path, tiny_bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags(tmp_path / "d.csv")
    how = ["task=custom", "task.dataset=d.csv", "task.type=multilabel", "task.label=[food,price,service]"]
    how += ["task.split_off=0.25", "task.max_length=32", "optim.epochs=1", "teacher.optim.epochs=1"]
    model = ["teacher=base", f"teacher.source={tiny_bert_folder}", "student.num_layers=2", "optim.batch_size=8"]
    ended = distill_run(tmp_path, *how, *model, "method=rkd", "runtime.device=cpu")
    assert ended.code == 0, ended.err
    folder = next((tmp_path / "outputs" / "runs").iterdir())
    assert json.loads((folder / "result.json").read_text())["metric"] == "f1_micro"
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    run_subcommand(
        "predict", [str(folder), str(tmp_path / "d.csv"), "--out", str(tmp_path / "said.csv"), "--device", "cpu"]
    )
    with (tmp_path / "said.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(TEXTS)
    for row in rows:
        said = [name for name in NAMES if float(row[f"p_{name}"]) > 0.5]
        assert row["prediction"] == ";".join(said)

    from transformers import pipeline

    classify: Any = pipeline("text-classification", model=str(folder / "model"), top_k=None)
    heard = {one["label"]: one["score"] for one in classify([TEXTS[0]])[0]}
    assert heard == pytest.approx({name: float(rows[0][f"p_{name}"]) for name in NAMES}, abs=1e-4)
