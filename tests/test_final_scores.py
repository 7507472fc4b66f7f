"""Test splits: found by name, scored once with models that other data chose, and never part of what is trained."""

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from distill_runner.common.errors import UserError
from distill_runner.pipeline.build import FinalScores
from distill_runner.report.result import scores_on_tests, scores_on_validation
from distill_runner.tasks import make_task
from distill_runner.tasks.task_splits import TaskSplits
from helpers.built_runs import Run, student
from helpers.classifiers import outputs_of
from helpers.made_questions import as_json, made_rows
from helpers.small_runs import Compose
from helpers.words import WORDS

PAIRS = [
    (f"{first} {second}", f"{second} {first}", ("no", "yes")[n % 3 == 0])
    for n, (first, second) in enumerate(zip(WORDS, WORDS[3:], strict=False))
]


def write(
    file: Path, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("sentence1", "sentence2", "label")
) -> None:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


@pytest.fixture
def data(tiny_task_folder: Path, tmp_path: Path) -> Path:
    """The tiny task with a labeled test split."""
    folder = tmp_path / "data"
    shutil.copytree(tiny_task_folder, folder)
    write(folder / "test.csv", PAIRS)
    return folder


def of_task(run: Any, stage: str = "student") -> dict[str, str]:
    task = run.stages[stage].task.resolved()
    return dict(task.test)


def test_a_split_named_test_is_found_in_the_folder(data: Path, compose: Compose) -> None:
    """A user who puts test.csv beside train.csv expects its score, and needs no option."""
    assert of_task(compose("method=rkd", f"task.dataset={data}")) == {"test": "test"}
    assert of_task(compose("method=rkd", f"task.dataset={data}", "task.test=null")) == {}
    (data / "test.csv").rename(data / "testing.csv")
    assert of_task(compose("method=rkd", f"task.dataset={data}")) == {"test": "test"}
    (data / "testing.csv").rename(data / "test-00000-of-00001.csv")
    assert of_task(compose("method=rkd", f"task.dataset={data}")) == {"test": "test"}
    (data / "test-00000-of-00001.csv").rename(data / "tested.csv")
    assert of_task(compose("method=rkd", f"task.dataset={data}")) == {}


def test_examples_that_are_used_before_are_no_test_split(data: Path) -> None:
    """A score on examples that selected the epoch is no test score."""
    fields: dict[str, Any] = {"name": "own", "dataset": str(data), "metrics": ["accuracy"], "epochs": 1}
    fields["max_length"] = 9
    for split, other in (("validation", "validation"), ("train[:50%]", "train[25%:75%]"), ("test[:5]", "test[4:]")):
        with pytest.raises(UserError, match=r"task\.test\.final=.*has rows of task\.validation\.dev"):
            make_task(**fields, train="train[75%:]", validation={"dev": other}, test={"final": split})
        optional = make_task(**fields, train="train[75%:]", validation={"dev": other}, test={"final": f"{split}?"})
        assert TaskSplits.resolved(optional).test == {}
    same_file = make_task(**fields, validation={"dev": "validation"}, test={"final": "dev?"})
    assert TaskSplits.resolved(same_file).test == {}
    with pytest.raises(UserError, match=r"task\.test\.final=train\[:10%\]: has rows of task\.train=train"):
        make_task(**fields, validation={"dev": "validation"}, test={"final": "train[:10%]"})


def test_a_test_split_changes_no_key(data: Path, compose: Compose) -> None:
    """Adding, changing or removing a test split trains nothing anew."""
    overrides = ("method=rkd", f"task.dataset={data}")
    keys = {
        student(compose(*overrides, *more)).key for more in ((), ("task.test=null",), ("task.test.other=test[:3]",))
    }
    write(data / "test.csv", PAIRS[:4])
    keys.add(student(compose(*overrides)).key)
    (data / "test.csv").unlink()
    keys.add(student(compose(*overrides)).key)
    assert len(keys) == 1


def test_scores_of_student_and_teacher(data: Path, compose: Compose) -> None:
    """The numbers are those of the saved models, computed by transformers and sklearn."""
    run = Run(compose("method=rkd", f"task.dataset={data}", "task.metrics=[accuracy,f1]", "student.num_layers=2"))
    folder, key = run.pipeline.build(run.stage), run.stage.key
    truth = [("no", "yes").index(label) for _, _, label in PAIRS]
    assert run.stage.teacher is not None
    for stage, artifact in ((run.stage, folder), (run.stage.teacher, run.pipeline.build(run.stage.teacher))):
        final = FinalScores(stage, run.pipeline)
        expected = outputs_of(artifact / "model", PAIRS)
        np.testing.assert_allclose(final.outputs("test"), expected, atol=1e-5)
        predicted = expected.argmax(1)
        reference = {"accuracy": accuracy_score(truth, predicted), "f1": f1_score(truth, predicted)}
        assert final.scores() == {"test": pytest.approx(reference)}
    assert run.trained == ["teacher", "student"]
    assert run.stage.key == key


def test_predictions_are_kept(data: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated run reads them from the store; other data under the same name are predicted anew."""
    overrides = ("method=rkd", f"task.dataset={data}", "task.epochs=1", f"store.dir={data / 'store'}")
    run = Run(compose(*overrides))
    run.pipeline.build(run.stage)
    first = FinalScores(run.stage, run.pipeline).scores()
    calls = list[int]()

    def predict(*_: object) -> np.ndarray:
        calls.append(1)
        return np.zeros((3, 2))

    monkeypatch.setattr("distill_runner.pipeline.build.predict", predict)
    again = Run(compose(*overrides))
    assert FinalScores(again.stage, again.pipeline).scores() == first
    more = Run(compose(*overrides, "task.metrics=[accuracy,f1]"))
    assert FinalScores(more.stage, more.pipeline).scores()["test"].keys() == {"accuracy", "f1"}
    assert not calls
    another = Run(compose(*overrides, "task.test.other=test[:3]"))
    assert FinalScores(another.stage, another.pipeline).scores().keys() == {"test", "other"}
    assert calls == [1]  # only of the split that is new
    write(data / "test.csv", PAIRS[:3])
    changed = Run(compose(*overrides))
    FinalScores(changed.stage, changed.pipeline).scores()
    assert calls == [1, 1]
    assert not changed.trained + again.trained + more.trained


@pytest.mark.parametrize("label", ["-1", "", None])
def test_a_split_without_labels_is_not_scored(data: Path, compose: Compose, label: str | None) -> None:
    """GLUE's test splits have no labels, or -1 in their place."""
    rows = [pair[:2] if label is None else (*pair[:2], label) for pair in PAIRS]
    write(data / "test.csv", rows, ("sentence1", "sentence2", "label")[: len(rows[0])])
    run = Run(compose("method=rkd", f"task.dataset={data}", "task.epochs=1"))
    assert FinalScores(run.stage, run.pipeline).splits == {}
    assert FinalScores(run.stage, run.pipeline).scores() == {}


def test_labels_of_some_rows_are_refused(data: Path, compose: Compose) -> None:
    """The mean over the labeled rows alone would be another number than its name says."""
    write(data / "test.csv", [*PAIRS[:5], ("a", "b", "")])
    run = Run(compose("method=rkd", f"task.dataset={data}", "task.epochs=1"))
    with pytest.raises(UserError, match=r"1 of 6 rows of split 'test' have no label"):
        _ = FinalScores(run.stage, run.pipeline).splits


def texts_of(folder: Path, labels: dict[str, list[str]], header: tuple[str, ...]) -> Path:
    folder.mkdir()
    for split, rows in labels.items():
        texts = [(" ".join(WORDS[n % 7 : n % 7 + 9]), label) for n, label in enumerate(rows)]
        write(folder / f"{split}.csv", texts, header)
    return folder


def regression(folder: Path) -> tuple[Path, list[str]]:
    scores = [str(n % 5 / 2) for n in range(24)]
    own = texts_of(folder, {"train": scores, "validation": scores[3:15]}, ("text", "label"))
    return own, ["task.type=regression", "task.labels=null", "task.metrics=[pearson,spearman]"]


def multilabel(folder: Path) -> tuple[Path, list[str]]:
    names = [("red", "red;blue", "", "blue")[n % 4] for n in range(24)]
    own = texts_of(folder, {"train": names, "validation": names[2:14]}, ("text", "label"))
    return own, ["task.type=multilabel", "task.separator=semicolon", "task.labels=[red,blue]", "task.metrics=null"]


def classification(folder: Path) -> tuple[Path, list[str]]:
    names = [("no", "yes")[n % 3 == 0] for n in range(24)]
    own = texts_of(folder, {"train": names, "validation": names[2:14]}, ("text", "label"))
    return own, ["task.metrics=[matthews,accuracy]", "task.select_on=held_out"]


def questions(folder: Path) -> tuple[Path, list[str]]:
    folder.mkdir()
    for split, seed in (("train", 1), ("validation", 2)):
        rows = [row for row in made_rows(40, seed, longest=30) if row["answers"]["text"]]
        (folder / f"{split}.json").write_text(json.dumps(as_json(rows)))
    options = ["task.type=questions", "task.columns=[question,context]", "task.label=answers", "task.labels=null"]
    return folder, [*options, "task.metrics=[f1,exact_match]", "+task.windowing.tokens=16"]


@pytest.mark.parametrize("of_type", [classification, regression, multilabel, questions])
def test_a_copy_of_the_validation_split_has_its_score(
    tmp_path: Path, compose: Compose, of_type: Callable[[Path], tuple[Path, list[str]]]
) -> None:
    """Of every type of task, of a student and of its teacher: the same examples, the same number."""
    folder, options = of_type(tmp_path / "own")
    (file,) = folder.glob("validation.*")
    shutil.copy(file, file.with_stem("test"))
    columns = [] if of_type is questions else ["task.columns=[text]"]
    overrides = ["method=rkd", f"task.dataset={folder}", *columns, *options, "task.epochs=2", "task.max_length=48"]
    config = compose(*overrides)
    run = Run(config)
    run.pipeline.build(run.stage)
    test = scores_on_tests(config, run.stage, run.pipeline)
    validation = scores_on_validation(config, run.stage, run.pipeline)
    assert test is not None
    assert run.stage.config.task is not None
    for metric in run.stage.config.task.metrics:
        assert test["metrics"][metric] == pytest.approx(validation["metrics"][metric], abs=1e-12)
    assert test["score"] == pytest.approx(validation["score"])
    assert test["teacher_score"] == pytest.approx(validation["teacher_score"])
    assert test["splits"]["test"]["metrics"] == test["metrics"]
