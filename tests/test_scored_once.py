"""Test splits from end to end: what a user reads of them, and that they never choose anything."""

import csv
import json
import random
import re
import shutil
import subprocess
import sys
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

NAMES = ("no", "yes")
SMALL = (
    "task.columns=[sentence1,sentence2]",
    "task.labels=[no,yes]",
    "task.max_length=48",
    "teacher=base",
    "student.num_layers=2",
    "optim.batch_size=16",
    "optim.epochs=8",
    "optim.lr=1e-3",
    "teacher.optim.epochs=8",
    "teacher.optim.lr=1e-3",
    "runtime.device=cpu",
)


def made_rows() -> list[tuple[str, str, str]]:
    """Rows like those of the tiny task: the second sentence has the words of its class."""
    draw, rows = random.Random(5), list[tuple[str, str, str]]()
    for number in range(90):
        label = number % 3 == 0
        first, second = WORDS, WORDS[6:] if label else WORDS[:12]
        one, other = (" ".join(draw.choices(words, k=draw.randint(2, 12))) for words in (first, second))
        rows.append((one, other, NAMES[label]))
    return rows


ROWS = made_rows()


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

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("outputs/runs/*/result.json"))]

    def stopped(self) -> list[Path]:
        """Folders of the runs that halving has stopped."""
        files = self.folder.glob("outputs/runs/*/status.json")
        return [file.parent for file in files if json.loads(file.read_text())["status"] == "paused"]


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
    for arguments in (("method=rkd",), ("method=nkd",), ("method=nkd", "optim.lr=3e-4")):
        for seed in (1, 2):
            made.run(*arguments, f"seed={seed}")
    return made


def of(place: Place, method: str, rate: float = 1e-3) -> list[dict[str, Any]]:
    """The results of one row, by seed."""
    runs = [run for run in place.results() if (run["method"], run["settings"]["optim.lr"]) == (method, rate)]
    return sorted(runs, key=lambda run: int(run["seed"]))


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_table_has_a_column_of_its_own(place: Place, tmp_path: Path) -> None:
    """The validation score chooses the point of a grid, also where another one has the better test score."""
    by_rate = {rate: of(place, "nkd", rate) for rate in (1e-3, 3e-4)}
    means = {rate: np.mean([run["score"] for run in runs]) for rate, runs in by_rate.items()}
    best, other = sorted(means, key=lambda rate: -means[rate])
    assert means[best] > means[other]
    shutil.copytree(place.folder / "outputs", tmp_path / "outputs")
    for run in by_rate[other]:
        file = tmp_path / run["folder"] / "result.json"
        run["test"]["score"] = run["test"]["splits"]["test"]["score"] = 1.0
        file.write_text(json.dumps(run))
    lines = csv.DictReader(distill_run(tmp_path, "table", "--format", "csv").out.splitlines())
    cells = {line["task"]: line for line in lines if line["row"] == "nkd"}
    assert cells.keys() == {"data", "data test"}
    assert cells["data test"]["kind"] == "chosen by data"
    for task, part in (("data", lambda run: run), ("data test", lambda run: run["test"])):
        expected = 100 * np.mean([part(run)["score"] for run in by_rate[best]])
        assert float(cells[task]["value"]) == pytest.approx(expected)


@pytest.mark.slow
def test_comparing_on_the_test_split(place: Place) -> None:
    """A sentence of its own, with the mean difference of what the saved models answer."""
    sides = [of(place, method) for method in ("rkd", "nkd")]
    folders = [run["folder"] for side in sides for run in side]
    printed = " ".join(distill_run(place.folder, "compare", "rkd", "nkd", "--runs", *folders).out.split())
    right = [np.stack([is_right(place.folder / run["model"]) for run in side]) for side in sides]
    difference = 100 * (right[0].mean() - right[1].mean())
    assert f"rkd against nkd on data test: {difference:+.2f} accuracy" in printed, printed
    by_seed = stats.ttest_rel(*(side.mean(1) for side in right)).pvalue
    assert f"p {by_seed:.4f}" in printed.split("data test")[1]


@pytest.mark.slow
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


# --- Every way to a finished student


@pytest.mark.slow
def test_a_run_in_parts_has_the_same_test_score(
    place: Place, tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    other = place_in(tmp_path / "other", tiny_task_folder, tiny_bert_folder)
    paused = other.run("method=nkd", "seed=1", "runtime.pause_after=3")
    assert "paused after epoch 3" in paused.err
    assert not list(other.folder.glob("outputs/runs/*/test-predictions-*"))  # of a model that is not chosen yet
    result = json.loads((run_folder(other.run("method=nkd", "seed=1"), other) / "result.json").read_text())
    expected = is_right(other.folder / result["model"]).mean()
    assert result["test"]["score"] == pytest.approx(expected)
    assert result["test"] == of(place, "nkd")[0]["test"]


@pytest.mark.slow
@pytest.mark.parametrize("halving", [[], ["sweep.halving=2"]])
def test_a_grid_chooses_by_validation(
    halving: list[str], tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    """Its own table has both columns; points that halving stops have no test score."""
    other = place_in(tmp_path / "other", tiny_task_folder, tiny_bert_folder)
    ended = other.run("-m", "method=nkd", "optim.lr=1e-3,1e-5", "optim.epochs=4", "seed=1", *halving)
    results, stopped = other.results(), other.stopped()
    assert len(stopped) + len(results) == 2
    assert not [file for folder in stopped for file in folder.glob("test-predictions-*")]
    best = max(results, key=lambda run: float(run["score"]))
    lines = [
        line.split() for line in ended.out.splitlines() if line.startswith("nkd")
    ]  # "chosen by data" if there are two
    assert [f"{100 * best['test']['score']:.2f}"] in [line[-1:] for line in lines], ended.out
    assert best["test"]["score"] == pytest.approx(is_right(other.folder / best["model"]).mean())


@pytest.mark.slow
def test_trackers_get_the_score(wandb_home: Path, tiny_task_folder: Path, tiny_bert_folder: Path) -> None:
    """In the summary of W&B, and in no curve: a curve would invite to choose by it."""
    wandb = pytest.importorskip("wandb")
    other = place_in(wandb_home / "work", tiny_task_folder, tiny_bert_folder)
    ended = other.run("method=nkd", "seed=1", "tracker=wandb", "tracker.project=pilot")
    wandb.teardown()
    folder = run_folder(ended, other)
    result = json.loads((folder / "result.json").read_text())
    (run,) = (folder / "wandb").glob("offline-run-*")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run)]
    summary = json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)["summary"]
    assert summary["test/score"] == result["test"]["score"]
    curves = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert not [name for values in curves for name in values if "test" in name]
