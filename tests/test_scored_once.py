"""Test splits from end to end: what a user reads of them, and that they never choose anything."""

import csv
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from helpers.command import Ended, distill_run
from helpers.words import WORDS

SMALL = (
    "task.columns=[sentence1,sentence2]",
    "task.labels=[no,yes]",
    "task.max_length=48",
    "teacher=base",
    "student.num_layers=2",
    "optim.epochs=2",
    "optim.batch_size=16",
    "teacher.optim.epochs=1",
    "teacher.optim.lr=3e-3",
    "optim.lr=3e-3",
    "runtime.device=cpu",
)
NAMES = ("no", "yes")
ROWS = [(f"{WORDS[n % 12]} {WORDS[n % 7]}", WORDS[n % 5 + 3], NAMES[n % 3 == 0]) for n in range(90)]


class Place:
    """A folder in which a user types commands, with data whose test split only has its usual name."""

    def __init__(self, folder: Path, tiny_task: Path, encoder: Path) -> None:
        self.folder, self.encoder = folder, encoder
        shutil.copytree(tiny_task, folder / "data")
        self.write_tests(ROWS)

    def write_tests(self, rows: Sequence[Sequence[str]]) -> None:
        with (self.folder / "data" / "test.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("sentence1", "sentence2", "label"), *rows])

    def run(self, *arguments: str) -> Ended:
        ended = self("task=custom", "task.dataset=data", f"teacher.source={self.encoder}", *SMALL, *arguments)
        assert ended.code == 0, ended.err
        return ended

    def __call__(self, *arguments: str) -> Ended:
        return distill_run(self.folder, *arguments)

    def results(self, runs: str = "outputs/runs") -> list[dict[str, Any]]:
        files = sorted((self.folder / runs).glob("*/result.json"))
        return [json.loads(file.read_text()) for file in files]


def place_in(folder: Path, tiny_task_folder: Path, tiny_bert_folder: Path) -> Place:
    folder.mkdir(exist_ok=True)
    return Place(folder, tiny_task_folder, tiny_bert_folder)


def run_folder(ended: Ended, place: Place) -> Path:
    found = re.search(r"^  folder +(.*)$", ended.out, re.MULTILINE)
    assert found, ended
    return place.folder / found[1]


def predicted(model_folder: Path, rows: Sequence[Sequence[str]] = ROWS) -> np.ndarray:
    """Classes by another route: the model of transformers, on one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    texts = [[row[n] for row in rows] for n in (0, 1)]
    batch = tokenizer(*texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.inference_mode():
        classes: np.ndarray = model(**batch).logits.argmax(-1).numpy()
    return classes


def is_right(model_folder: Path) -> np.ndarray:
    return predicted(model_folder) == [NAMES.index(label) for *_, label in ROWS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_task_folder: Path, tiny_bert_folder: Path) -> Place:
    """Two methods, two seeds, and one of them with two learning rates."""
    made = place_in(tmp_path_factory.mktemp("scored") / "work", tiny_task_folder, tiny_bert_folder)
    for arguments in (("method=rkd",), ("method=nkd",), ("method=nkd", "optim.lr=1e-4")):
        for seed in (1, 2):
            made.run(*arguments, f"seed={seed}")
    return made


def test_a_run_reports_the_score(place: Place) -> None:
    """Announced in the first lines; then in the summary, in ``result.json`` and on the card, as transformers has it."""
    ended = place.run("method=rkd", "seed=1")
    folder = run_folder(ended, place)
    announced = "task.test.test: data has a split test, which is scored once, at the end"
    assert announced in ended.err + ended.out
    expected = is_right(folder / "model").mean()
    result = json.loads((folder / "result.json").read_text())
    assert result["test"]["score"] == pytest.approx(expected)
    assert result["test"]["splits"]["test"]["metrics"] == {"accuracy": pytest.approx(expected)}
    assert f"{100 * expected:.2f}" in next(line for line in ended.out.splitlines() if "test" in line)
    card = (folder / "model" / "README.md").read_text()
    entries = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert {entry["dataset"]["split"]: entry["metrics"][0]["value"] for entry in entries} == {
        "validation": pytest.approx(result["score"]),
        "test": pytest.approx(expected),
    }
    assert f"{100 * expected:.2f}" in card.split("## Scores on the test set")[1].split("##")[0]


def test_the_table_has_a_column_of_its_own(place: Place) -> None:
    """The validation score chooses the point of a grid, whatever the test scores are."""
    columns = json.loads(place("table", "--format", "json").out)
    (nkd,) = (row for row in columns["rows"] if row["name"] == "nkd")
    runs = [run for run in place.results() if run["method"] == "nkd"]
    by_rate = {rate: [run for run in runs if run["settings"]["optim.lr"] == rate] for rate in (3e-3, 1e-4)}
    best = max(by_rate.values(), key=lambda of_rate: np.mean([run["score"] for run in of_rate]))
    assert nkd["cells"]["data"]["value"] == pytest.approx(100 * np.mean([run["score"] for run in best]))
    assert nkd["cells"]["data test"]["value"] == pytest.approx(100 * np.mean([run["test"]["score"] for run in best]))


def test_comparing_on_the_test_split(place: Place) -> None:
    """A sentence of its own, with McNemar's p of what the saved models answer."""
    printed = " ".join(place("compare", "rkd", "nkd, optim.lr 0.003").out.split())
    assert "on data test" in printed


def test_other_test_labels_change_no_choice(
    place: Place, tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    """The opposite labels turn the score around, and nothing else."""
    other = place_in(tmp_path / "other", tiny_task_folder, tiny_bert_folder)
    other.write_tests([(*row[:2], NAMES[1 - NAMES.index(row[2])]) for row in ROWS])
    ended = other.run("method=rkd", "seed=1")
    result = json.loads((run_folder(ended, other) / "result.json").read_text())
    (own,) = (run for run in place.results() if (run["method"], run["seed"]) == ("rkd", 1))
    same = ("key", "score", "metrics", "best_epoch", "history", "splits")
    assert {name: result[name] for name in same} == {name: own[name] for name in same}
    assert result["test"]["score"] == pytest.approx(1 - own["test"]["score"])
