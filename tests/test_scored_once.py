"""Test splits from end to end: what a user reads of them, and that they never choose anything."""

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.classifiers import outputs_of
from helpers.command import Ended, distill_run
from helpers.words import WORDS

NAMES = ("no", "yes")
SMALL = """task=custom task.dataset=data task.columns=[sentence1,sentence2] task.labels=[no,yes] task.max_length=48
    teacher=base student.num_layers=2 optim.batch_size=16 optim.epochs=8 optim.lr=1e-3 teacher.optim.epochs=8
    teacher.optim.lr=1e-3 runtime.device=cpu method=rkd"""


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
OPPOSITE = [(*row[:2], NAMES[1 - NAMES.index(row[2])]) for row in ROWS]


def run(folder: Path, data: Path, encoder: Path, *arguments: str, rows: Any = ROWS) -> tuple[Ended, dict[str, Any]]:
    """A command with data whose test split only has its usual name, and its result, if it has one."""
    shutil.copytree(data, folder / "data", dirs_exist_ok=True)
    with (folder / "data" / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("sentence1", "sentence2", "label"), *rows])
    ended = distill_run(folder, *SMALL.split(), f"teacher.source={encoder}", *arguments)
    assert ended.code == 0, ended.err
    files = list(folder.glob("outputs/runs/*/result.json"))
    return ended, json.loads(files[0].read_text()) if files else {}


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, tiny_task_folder: Path, tiny_bert_folder: Path
) -> tuple[Ended, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("scored")
    return (*run(folder, tiny_task_folder, tiny_bert_folder), folder)


@pytest.mark.slow
def test_a_run_reports_the_score(first: tuple[Ended, dict[str, Any], Path]) -> None:
    """Announced in the first lines; then in the summary, in ``result.json`` and on the card, as transformers has it."""
    ended, result, folder = first
    assert "task.test.test: data has a split test, which is scored once, at the end" in ended.err + ended.out
    classes = outputs_of(folder / result["model"], ROWS).argmax(-1)
    expected = sum(NAMES[number] == row[2] for number, row in zip(classes, ROWS, strict=True)) / len(ROWS)
    assert result["test"]["splits"]["test"]["metrics"] == {"accuracy": pytest.approx(expected)}
    assert f"{100 * expected:.2f}" in next(line for line in ended.out.splitlines() if "test" in line)
    card = (folder / result["model"] / "README.md").read_text()
    entries = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert {entry["dataset"]["split"]: entry["metrics"][0]["value"] for entry in entries} == {
        "validation": pytest.approx(result["score"]),
        "test": pytest.approx(expected),
    }
    assert f"{100 * expected:.2f}" in card.split("## Scores on the test set")[1].split("##")[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["opposite labels", "paused"])
def test_a_test_split_chooses_nothing_and_is_scored_in_every_way(
    how: str, first: tuple[Ended, dict[str, Any], Path], tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    """The opposite labels turn the score around, and nothing else; a run in parts has the same score."""
    _, own, _ = first
    if how == "paused":
        paused, _ = run(tmp_path, tiny_task_folder, tiny_bert_folder, "runtime.pause_after=3")
        assert "paused after epoch 3" in paused.err
        assert not list(tmp_path.glob("outputs/runs/*/test-predictions-*"))  # of a model that is not chosen yet
    rows = OPPOSITE if how == "opposite labels" else ROWS
    _, result = run(tmp_path, tiny_task_folder, tiny_bert_folder, rows=rows)
    if how == "opposite labels":
        same = ("key", "score", "metrics", "best_epoch", "history", "splits")
        assert {name: result[name] for name in same} == {name: own[name] for name in same}
        assert result["test"]["score"] == pytest.approx(1 - own["test"]["score"])
    else:
        assert result["test"] == own["test"]
