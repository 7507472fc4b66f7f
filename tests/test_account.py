"""The account of what a run read: its lines by hand, its warnings, and where they are printed and stored."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import classification_report

from distill_runner.common.errors import TrainingError, UserError
from distill_runner.common.terminal import AccountLine
from distill_runner.pipeline.account import account_of_run
from distill_runner.report.formats import result_row
from distill_runner.running import run_stage
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.split_account import SplitAccount, data_line, length_counts, lengths_line
from helpers.built_runs import Run
from helpers.small_runs import Compose

Row = tuple[str, str]
GOOD = [(f"a good film number {number}", "yes") for number in range(30)]
BAD = [(f"the bad one of {number}", "no") for number in range(30)]
SETTINGS = {"recipe": {"paper": "paper"}}
ROWS: list[Row] = [row for pair in zip(GOOD, BAD, strict=True) for row in pair]


def save(folder: Path, **splits: Sequence[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    return folder


def lines_of(compose: Compose, folder: Path, *overrides: str) -> dict[str, AccountLine]:
    """Return the lines of a plan by topic."""
    run = Run(compose(f"task.dataset={folder}", "task.columns=[]", "task.labels=null", *overrides))
    return {line.topic: line for line in account_of_run(run.stage, run.pipeline.inputs)}


def test_the_lines_of_own_files(tmp_path: Path, compose: Compose) -> None:
    """A user reads here which column was taken for what; a wrong count would be believed."""
    rows = [*ROWS[:20], ("  ", "no"), ("", "yes")]
    lines = lines_of(compose, save(tmp_path / "d", train=rows, validation=ROWS[40:]))
    assert str(lines["data"]) == (
        "data     train.csv 22 rows (2 without text), validation.csv 20 rows; "
        "text = text; label = label (no 11, yes 11)"
    )
    assert lines["data"].warnings == ("2 of 22 examples of train have no text",)
    longest = max(len(text.split()) for text, _ in ROWS)
    assert lines["lengths"].details["splits"]["train"]["limit"] == 48
    assert lines["lengths"].details["splits"]["train"]["longest"] >= longest + 2
    assert lines["lengths"].text.endswith("tokens, none cut")
    assert lines["weights"].text.endswith("; 2 layers kept")


def test_a_transfer_set_is_accounted_for_before_it_is_tokenized(tmp_path: Path, compose: Compose) -> None:
    """A plan without its lines hides that all unlabeled texts are cut, or that the wrong column was read."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train-0-of-1.csv").write_text("body,label,z0,z1\n" + "some words,1,0,1\n" * 6, encoding="utf-8")
    part = f"{{dataset: {texts}, columns: [body]}}"
    own = save(tmp_path / "d", train=ROWS[:20], validation=ROWS[40:])
    overrides = ("method=kd", "student=truncated", "transfer=custom", f"transfer.parts={{inputs: {part}}}")
    lines = lines_of(compose, own, *overrides, "teacher=labels", "task.probabilities=[z0,z1]")
    assert "train-0-of-1.csv 6 rows" in lines["data"].text
    assert lines["data"].text.endswith("text = body, evaluated on text; not read: label"), "the scores are read"
    assert "lengths" in lines
    assert not any("not read" in warning for warning in lines["data"].warnings), "the teacher reads train.csv"
    more = f"+transfer.parts.more={{dataset: {texts}, columns: [label]}}"
    assert "text = body or label" in lines_of(compose, own, *overrides, more)["data"].text


def test_scores_that_are_not_the_teacher_are_named(tmp_path: Path, compose: Compose) -> None:
    """Rows without scores were left out without a word, although nothing else read these."""
    folder = save(tmp_path, train=ROWS[:20], validation=ROWS[40:])
    rows = "".join(f"{text},{label},{number % 2},{1 - number % 2}\n" for number, (text, label) in enumerate(ROWS[:20]))
    (folder / "train.csv").write_text(f"text,label,z0,z1\n{rows}no score,no,,\n", encoding="utf-8")
    line = lines_of(compose, folder, "method=nkd", "task.probabilities=[z0,z1]")["scores"]
    assert "1 of 21 rows without a score left out" in line.text
    assert "these scores are not the teacher here (teacher=labels)" in line.warnings


def test_files_that_look_like_those_of_a_split_are_named(tmp_path: Path, compose: Compose) -> None:
    """train2.csv beside train.csv was left out without a word."""
    parts = {"train": ROWS[:20], "train2": ROWS[20:40], "Train3": ROWS, "validation": ROWS[40:], "notes": ROWS}
    line = lines_of(compose, save(tmp_path / "d", **parts))["data"]
    assert "not read: Train3.csv, train2.csv" in line.warnings
    assert not any("notes" in warning for warning in line.warnings)


def test_files_of_one_name_in_the_folders_of_two_splits_are_listed_apart(tmp_path: Path, compose: Compose) -> None:
    for split, rows in (("train", ROWS[:20]), ("validation", ROWS[40:50])):
        save(tmp_path / split, a=rows)
    assert lines_of(compose, tmp_path)["data"].text.startswith("a.csv 20 rows, a.csv 10 rows; text = text")


def test_rows_of_a_slice_are_counted(tmp_path: Path, compose: Compose) -> None:
    """Who takes a tenth of a file for validation must see how many examples that is."""
    text = lines_of(compose, save(tmp_path / "d", train=ROWS), "task.split_off=0.25")["data"].text
    assert text.startswith("train.csv 60 rows: 45 for train, 15 for validation; text = text; label = label (no 22,")
    folder = save(tmp_path / "d", validation=ROWS)
    text = lines_of(compose, folder, "stages.student.share=0.5", "select_on=held_out")["data"].text
    assert text.endswith(
        "10.0 % of the training examples select the epoch; 50 % of the training examples are trained on"
    )


@pytest.mark.parametrize(
    ("splits", "warning"),
    [
        ({"train": ROWS[:40], "validation": ROWS[:20]}, "20 of 20 examples of validation (100 %) are in the training"),
        ({"train": ROWS[:40], "validation": GOOD[20:]}, "validation has no example of no"),
        ({"train": [*ROWS[:40], ("", "no")], "validation": ROWS[40:]}, "1 of 41 examples of train have no text"),
        (
            {"train": [(f"{label}: {text}", label) for text, label in ROWS[:40]], "validation": ROWS[40:]},
            "text gives the label away: the first word predicts 100 % of the labels",
        ),
        (
            {"train": [("good" if label == "yes" else "bad", label) for _, label in ROWS], "validation": ROWS[40:]},
            "text gives the label away: its 2 different texts have one label each",
        ),
    ],
    ids=["duplicates", "classes", "blank", "prefix", "determined"],
)
def test_what_would_surprise_is_a_warning(
    tmp_path: Path, compose: Compose, splits: dict[str, Any], warning: str
) -> None:
    """Each of these gives a score that says something else than its reader believes."""
    lines = lines_of(compose, save(tmp_path / "d", **splits)).values()
    assert any(warning in text for line in lines for text in line.warnings), [line.warnings for line in lines]


def test_plain_data_have_no_warnings(tmp_path: Path, compose: Compose) -> None:
    """Warnings about sound data would teach people not to read them."""
    rng = np.random.default_rng(0)
    rows = [(" ".join(rng.permutation([*"abcdefghijklm"])), ("no", "yes")[n % 2]) for n in range(60)]
    lines = lines_of(compose, save(tmp_path / "d", train=rows[:40], validation=rows[40:]))
    assert not [warning for topic in ("data", "lengths") for warning in lines[topic].warnings]


def test_the_plan_and_the_run_say_the_same_and_the_result_stores_it(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan that differs from its run, or a result without its account, could not be relied on later."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    folder = save(tmp_path / "d", train=ROWS[:40], validation=ROWS[30:], test=ROWS[20:40])
    options = [f"task.dataset={folder}", "task.columns=[]", "task.labels=null", "optim.max_steps=2"]
    options += ["student.vocabulary=trim", "teacher.optim.max_steps=2", f"store.dir={tmp_path / 'store'}"]

    def printed() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in texts if text.split(" ")[0] in ("data", "lengths", "warning:")]

    run_stage(compose(*options, "plan=true"), tmp_path, SETTINGS)
    planned = printed()
    result = run_stage(compose(*options), tmp_path, SETTINGS)
    assert planned[0].startswith("data     train.csv 40 rows, validation.csv 30 rows, test.csv 20 rows; text = text; ")
    shared = "warning: 10 of 30 examples of validation (33 %) are in the training data too, word for word or nearly: "
    assert any(line.startswith(shared) for line in planned)
    built = printed()
    assert [line for line in built if line in planned] == planned
    data = result["account"][0]
    assert f"{data['topic']:8} {data['text']}" == planned[0]
    assert data["splits"]["train"]["rows"] == 40
    assert data["splits"]["train"]["counts"] == {"no": 20, "yes": 20}
    assert data["splits"]["validation"]["files"][0]["name"] == "validation.csv"
    (tokens,) = [entry for entry in result["account"] if entry["topic"] == "tokens"]
    assert tokens["changed"].keys() == {"validation", "test"}, "the test split is read after the training"
    run_stage(compose(*options), tmp_path, SETTINGS)
    assert [line for line in printed() if line in planned] == planned


def test_splits_in_many_files_and_of_many_classes_stay_short() -> None:
    """A hundred shards or 77 intents would push what matters off the screen."""
    counts = {f"class {number}": 10 + number for number in range(77)}
    train = SplitAccount("train", "a/b on the hub", [], 900, 900, ["text"], "label", [f"c{n}" for n in range(40)])
    train.counts = counts
    line = data_line({"train": train}, {}, "text")
    assert line.text == (
        "a/b on the hub train 900 rows; text = text; label = label (77 classes of 10 to 86); not read: "
        + ", ".join(f"c{number}" for number in range(12))
        + " and 28 more"
    )


def test_the_line_of_lengths_by_hand() -> None:
    """The share that is cut is the first thing to look at when a score on long texts is low."""
    train = SplitAccount("train", rows=4, lengths=length_counts(np.array([3, 5, 8, 8]), 2, 8))
    test = SplitAccount("test", lengths=length_counts(np.array([3, 8]), 1, 8))
    line = lengths_line({"train": train, "test": test})
    assert line is not None
    assert str(line) == "lengths  median 6 tokens, longer than task.max_length=8 and cut: train 50 %, test 50 %"
    assert not line.warnings, "the line says it"
    parts = {"train": replace(train, rows=2), "test": replace(test, lengths={**test.lengths, "sample": True})}
    assert "median 6 tokens in 4 windows or texts, " in str(lengths_line(parts))
    assert str(lengths_line(parts)).endswith(" (of the first 2 of test)")
    cut = SplitAccount("train", lengths=length_counts(np.array([8, 8, 8, 3]), 3, 8))
    assert "median over 8 tokens" in str(lengths_line({"train": cut}))
    assert lengths_line({"train": SplitAccount("train")}) is None


# --- Scores


def test_a_run_whose_student_predicts_one_class_says_so(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An accuracy of 75 of a student that says yes to everything would be taken for learning."""
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "d", train=[*ROWS[:20], *GOOD[10:25]], validation=ROWS[50:])
    options = [f"task.dataset={folder}", "task.columns=[]", "task.labels=null", "task.metrics=[matthews]"]
    options += ["optim.max_steps=1", "teacher.optim.max_steps=1", "optim.lr=1e-9"]
    result = run_stage(compose(*options), tmp_path, {})
    scores = [entry for entry in result["account"] if entry["topic"] == "scores"]
    assert scores, result["account"]
    assert any("is predicted for all" in warning for warning in scores[0]["warnings"])
    assert scores[0]["undefined"] == {"validation": {"matthews": "one class is predicted for all examples"}}
    assert "undefined" in result_row(result)


def test_classes_that_are_never_predicted_are_named() -> None:
    """With the scores of each class, as scikit-learn's report has them."""
    options: dict[str, Any] = {"name": "t", "dataset": "d", "validation": {"validation": "validation"}}
    options |= {"columns": ["text"], "labels": ["a", "b", "c"], "metrics": ["accuracy"], "max_length": 8}
    task = ClassificationTask(**options, label="label", epochs=1)
    labels, outputs = np.array([0, 0, 1, 1, 2]), np.eye(3)[[0, 0, 0, 1, 1]]
    split: Any = SimpleNamespace(labels=labels)
    assert task.prediction_warnings(outputs, split) == ["the student never predicts c (1 example)"]
    assert task.prediction_warnings(np.eye(3)[labels], split) == []
    shown = {"target_names": task.labels, "output_dict": True, "zero_division": 0}
    report = classification_report(labels, outputs.argmax(axis=1), **shown)
    for name, row in task.scores_by_class(outputs, split).items():
        assert row == pytest.approx({key.removesuffix("-score"): value for key, value in report[name].items()})


def test_a_folder_holds_one_student(compose: Compose, tmp_path: Path) -> None:
    """On changed data, the curve went on from the other run's, and its exported files stayed beside new weights."""
    options = "method=nkd", "optim.max_steps=2", "student.num_layers=1", "runtime.log_every=1", f"store.dir={tmp_path}"
    run_stage(compose(*options), tmp_path, SETTINGS)
    count = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    (tmp_path / "model" / "onnx").mkdir()
    (tmp_path / "deploy.json").write_text("{}")
    run_stage(compose(*options), tmp_path, SETTINGS)
    assert (tmp_path / "deploy.json").exists(), "the same student keeps its files"
    run_stage(compose(*options), tmp_path / "other", SETTINGS)
    scores = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "validation" in line]
    assert (tmp_path / "other" / "metrics.jsonl").read_text().splitlines() == scores, "what the store has of its curves"
    run_stage(compose(*options, "seed=7"), tmp_path, SETTINGS)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == count
    assert not (tmp_path / "deploy.json").exists()
    assert not (tmp_path / "model" / "onnx").exists()
    assert (tmp_path / "model" / "config.json").exists()
    with pytest.raises(TrainingError):
        run_stage(compose(*options, "seed=8", "optim.lr=1e30", "optim.max_steps=4"), tmp_path, SETTINGS)
    assert not [*tmp_path.glob("result.json"), *tmp_path.glob("predictions*")], "they are of another run than model/"


def test_a_folder_with_files_of_others_is_refused(compose: Compose, tmp_path: Path) -> None:
    """A data set called pictures was deleted from a folder that somebody works in (hydra.run.dir=.)."""
    (tmp_path / "pictures" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match=r"hydra.run.dir=.*: holds pictures, which no run of this program wrote"):
        run_stage(compose("method=nkd", f"store.dir={tmp_path}/store"), tmp_path, SETTINGS)
    assert (tmp_path / "pictures" / "train").is_dir()
