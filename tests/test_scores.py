"""Scores of another model in columns of the data, and training data without gold labels."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.datasets.tokenization import Examples
from distill_runner.pipeline import account
from distill_runner.pipeline.account import score_lines
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store, key_of
from distill_runner.pipeline.targets import targets_spec
from distill_runner.tasks import make_task
from distill_runner.tasks.class_names import names_of_columns
from distill_runner.tasks.decoding import class_loss
from distill_runner.tasks.scores import are_stated, scores_line
from helpers.columns import column_outputs
from helpers.command import distill_run

Compose = Callable[..., RunConfig]
Columns = dict[str, list[Any]]


def save(folder: Path, **splits: Columns) -> Path:
    """A folder with a CSV file for each split."""
    folder.mkdir(exist_ok=True)
    for split, columns in splits.items():
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return folder


def texts(count: int) -> list[str]:
    return [f"sentence number {number}" for number in range(count)]


GOLD: Columns = {"text": [f"other text {number}" for number in range(4)], "label": ["bad", "good", "good", "bad"]}


def task(folder: Path, **fields: Any) -> Any:
    plain = {"name": "own", "dataset": str(folder), "metrics": None, "max_length": 32, "epochs": 1}
    return make_task(**plain | {"validation": {"validation": "validation"}} | fields).resolved()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return np.asarray(powers / powers.sum(1, keepdims=True))


# --- From columns to outputs


def test_probabilities_without_labels_name_the_classes_and_are_normalized(tmp_path: Path) -> None:
    train: Columns = {"text": texts(3), "p_good": [0.701, 0.2, 1], "p_bad": [0.3, 0.8, 0]}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=["p_good", "p_bad"])
    assert (own.labels, own.gold, own.columns) == (["good", "bad"], "evaluation", ["text"])
    assert own.examples("train").labels is None
    assert own.examples("validation").labels.tolist() == [1, 0, 0, 1]
    expected = np.array([[0.701 / 1.001, 0.3 / 1.001], [0.2, 0.8], [1, 0]])
    np.testing.assert_allclose(softmax(column_outputs(own)), expected, atol=1e-7)
    assert "1 row with sums from 1.001 to 1.001 normalized" in str(scores_line(own, None))


@pytest.mark.parametrize(
    ("columns", "probabilities", "words"),
    [
        ({"p_bad": [0.5, 0.2], "p_good": [0.5, 0.7]}, ["p_bad", "p_good"], r"row 1 .*no probabilities"),
        ({"p_bad": ["", ""], "p_good": [0.5, 0.7]}, ["p_bad", "p_good"], "no row of split 'train' has a score"),
        ({"p_bad": ["low", 1], "p_good": [0.5, 0]}, ["p_bad", "p_good"], "row 0 .* has .low., not a finite number"),
        ({"p_bad": [0, 1], "p_good": [1, 0]}, ["p_bad", "p_fine"], "no column 'p_fine'"),
    ],
)
def test_what_is_no_distribution_is_refused(
    tmp_path: Path, columns: Columns, probabilities: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        column_outputs(
            task(save(tmp_path, train={"text": texts(2), **columns}, validation=GOLD), probabilities=probabilities)
        )


def test_columns_in_another_order_than_the_classes_are_refused(tmp_path: Path) -> None:
    train: Columns = {"text": texts(4), "label": GOLD["label"], "p_good": [0.5] * 4, "p_bad": [0.5] * 4}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=["p_good", "p_bad"])
    with pytest.raises(UserError, match=r"another order than the classes, bad, good\n.*\[p_bad,p_good\]"):
        column_outputs(own)


@pytest.mark.parametrize(("column", "of"), [("p_bad", 0), ("p_good", 1), ("score", 1)])
def test_one_column_is_that_of_the_class_it_names_or_of_the_second(tmp_path: Path, column: str, of: int) -> None:
    own = task(save(tmp_path, train={"text": texts(2), column: [0.9, 0.25]}, validation=GOLD), probabilities=[column])
    np.testing.assert_allclose(softmax(column_outputs(own))[:, of], [0.9, 0.25], atol=1e-7)
    assert f"{column} is that of {['bad', 'good'][of]}" in str(scores_line(own, None))


def test_percentages_are_divided_by_100(tmp_path: Path) -> None:
    train: Columns = {"text": texts(2), "bad": [85, 10], "good": [15, 90]}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=["bad", "good"])
    np.testing.assert_allclose(softmax(column_outputs(own)), [[0.85, 0.15], [0.1, 0.9]], atol=1e-7)


def test_answers_are_shares_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    train: Columns = {
        "text": texts(4),
        "first": ["good", "bad", "", "Good"],
        "second": ["good", "good", "unclear", ""],
        "third": ["bad", "good", "", ""],
    }
    own = task(
        save(tmp_path, train=train, validation=GOLD), answers=["first", "second", "third"], no_answer=["unclear"]
    )
    assert own.labels == ["bad", "good"]
    assert own.examples("train").texts == [[text for text in texts(4) if "2" not in text]]
    np.testing.assert_allclose(softmax(column_outputs(own)), [[1 / 3, 2 / 3]] * 2 + [[0, 1]], atol=1e-6)
    line = str(scores_line(own, None))
    assert "3 rows; shares of 1 to 3 answers; 1 of 4 rows without an answer left out" in line
    with pytest.raises(UserError, match="the answer 'unclear', which is not among"):
        column_outputs(own.model_copy(update={"no_answer": []}))


def test_scores_of_several_labels_and_of_regression(tmp_path: Path) -> None:
    train: Columns = {"text": texts(2), "p_a": [0.9, 0.2], "p_b": [0.5, ""]}
    flags: Columns = {"text": ["x", "y"], "a": [1, 0], "b": [1, 1]}
    folder = save(tmp_path / "labels", train=train, validation=flags)
    own = task(folder, type="multilabel", label=["a", "b"], probabilities=["p_a", "p_b"])
    np.testing.assert_allclose(1 / (1 + np.exp(-column_outputs(own))), [[0.9, 0.5]], atol=1e-7)
    assert own.examples("train").labels is None
    rated: Columns = {"text": texts(2), "first": [1, 4], "second": [2, ""]}
    folder = save(tmp_path / "scores", train=rated, validation={"text": ["x", "y"], "label": [1.5, 2.5]})
    own = task(folder, type="regression", answers=["first", "second"])
    np.testing.assert_allclose(column_outputs(own), np.array([[1.5], [4]]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.sampled_from(["0.1,0.9", "0.6,0.4", ",0.5", "0.5,", ",", "nan,1"]), min_size=1, max_size=9))
def test_examples_and_outputs_are_the_same_rows(tmp_path: Path, rows: list[str]) -> None:
    """Whatever is missing, and with ``keep``: row n of the outputs belongs to text n of the examples."""
    cells = [row.split(",") for row in ["0.3,0.7", *rows]]
    train: Columns = {
        "text": texts(len(cells)),
        "p_bad": [row[0] for row in cells],
        "p_good": [row[1] for row in cells],
    }
    folder = save(tmp_path, train=train, validation=GOLD)
    for keep, least in ((None, 0.0), ("confident:0.65", 0.65)):
        own = task(folder, probabilities=["p_bad", "p_good"], keep=keep)
        full = [all(cell not in ("", "nan") for cell in row) and max(map(float, row)) >= least for row in cells]
        examples, outputs = own.examples("train"), column_outputs(own)
        assert examples.texts == [[text for text, one in zip(texts(len(cells)), full, strict=True) if one]]
        expected = [list(map(float, row)) for row, one in zip(cells, full, strict=True) if one]
        np.testing.assert_allclose(softmax(outputs), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["p_bad", "p_good"], ["bad", "good"]),
        (["bad", "good"], ["bad", "good"]),
        (["prob.very_bad", "prob.very_good"], ["bad", "good"]),
        (["score_0", "score_1"], ["0", "1"]),
        (["bad", "badly"], ["bad", "badly"]),
    ],
)
def test_names_of_columns(columns: list[str], names: list[str]) -> None:
    assert names_of_columns(columns) == names


# --- Quality


def test_quality_before_training_by_hand(tmp_path: Path) -> None:
    scored = GOLD | {"p_bad": [0.9, 0.95, 0.3, 0.8], "p_good": [0.1, 0.05, 0.7, 0.2]}
    train: Columns = {"text": texts(2), "p_bad": [0.5, 0.5], "p_good": [0.5, 0.5]}
    own = task(save(tmp_path, train=train, validation=scored), probabilities=["p_bad", "p_good"])
    line = scores_line(own, None)
    measured = line.details["quality"]["validation"]
    assert measured["accuracy"] == 0.75
    # Bins of 1/15: 0.9 in the 14th (right), 0.95 in the 15th (wrong), 0.7 in the 11th, 0.8 in the 13th (both right).
    assert measured["ece"] == pytest.approx((0.1 + 0.95 + 0.3 + 0.2) / 4)
    assert measured["reliability"] == [[0.7, 1, 1.0], [0.8, 1, 1.0], [0.9, 2, 0.5]]
    assert "50 % right of 2 with 90 to 99 %" in str(line)
    swapped = scored | {"p_bad": scored["p_good"], "p_good": scored["p_bad"]}
    own = task(save(tmp_path, train=train, validation=swapped), probabilities=["p_bad", "p_good"])
    assert any("are columns swapped?" in warning for warning in scores_line(own, None).warnings)
    blank = GOLD | {"p_bad": ["", "", "0.5", ""], "p_good": ["", "0.5", "", ""]}
    own = task(save(tmp_path, train=train, validation=blank), probabilities=["p_bad", "p_good"])
    assert "validation has none, so that their quality is unknown" in str(scores_line(own, None))
    answered = GOLD | {"answer": ["", "unclear"] * 2}
    save(tmp_path, train={"text": texts(2), "answer": ["bad", "good"]}, validation=answered)
    assert "validation has none" in str(scores_line(task(tmp_path, answers=["answer"], no_answer=["unclear"]), None))


def test_stated_percentages_are_noticed() -> None:
    rng = np.random.default_rng(0)
    stated = rng.choice([0.05, 0.1, 0.2, 0.3, 0.85, 0.9, 0.95], size=200)
    measured = rng.random(200)
    shares = rng.choice([0, 1 / 3, 2 / 3, 1], size=200)
    both = [np.log(np.maximum(np.stack([p, 1 - p], 1), 1e-12)) for p in (stated, measured, shares)]
    assert [are_stated(outputs) for outputs in both] == [True, False, False]


def test_keep_tells_its_coverage_by_class(tmp_path: Path) -> None:
    train: Columns = {"text": texts(4), "p_bad": [0.9, 0.6, 0.2, 0.45], "p_good": [0.1, 0.4, 0.8, 0.55]}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=["p_bad", "p_good"], keep="confident:0.7")
    assert "confident:0.7 keeps 2 of 4 (50.0%): bad 1 of 2, good 1 of 2" in str(scores_line(own, None))
    with pytest.raises(UserError, match="leaves no row"):
        column_outputs(own.model_copy(update={"keep": "confident:0.95"}))


def test_the_temperature_is_the_best_of_a_fine_grid(tmp_path: Path) -> None:
    """Scores that are three times too sure: calibration finds the temperature, and the scores become the true ones."""
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 1.5, size=400)
    labels = ["good" if rng.random() < 1 / (1 + np.exp(-margin)) else "bad" for margin in margins]
    scored: Columns = {"text": texts(400), "label": labels, "z_good": (3 * margins).tolist()}
    train: Columns = {"text": texts(2), "z_good": [3.0, -6.0]}
    own = task(save(tmp_path, train=train, validation=scored), logits=["z_good"], calibrate=True)
    outputs = np.stack([np.zeros(400), 3 * margins], axis=1)
    gold = np.array([["bad", "good"].index(label) for label in labels])
    grid = np.linspace(0.5, 10, 4000)
    best = grid[np.argmin([class_loss(outputs / temperature, gold) for temperature in grid])]
    assert own.temperature == pytest.approx(best, rel=2e-3)
    assert 2 < own.temperature < 4.5
    np.testing.assert_allclose(column_outputs(own)[:, 1], np.array([3, -6]) / own.temperature, rtol=1e-6)
    fresh = task(tmp_path, logits=["z_good"], calibrate=True)
    with recorded_tables() as tables:
        fresh.examples("train")
        column_outputs(fresh)
    assert {record.name for table in tables for record in table.files} == {"train.csv"}
    plain = own.model_copy(update={"calibrate": False})
    measured = [scores_line(one, None).details["quality"]["validation"]["ece"] for one in (own, plain)]
    assert measured[0] < measured[1] / 2
    assert "calibrated: divided by the temperature" in str(scores_line(own, None))
    with pytest.raises(UserError, match="no column 'z_good'"):
        column_outputs(task(save(tmp_path, train=train, validation=GOLD), logits=["z_good"], calibrate=True))
    save(tmp_path, validation=GOLD | {"z_good": [""] * 4})
    with pytest.raises(UserError, match="with scores to fit a temperature on"):
        column_outputs(task(tmp_path, logits=["z_good"], calibrate=True))


def test_the_key_tells_which_split_calibrates(tmp_path: Path) -> None:
    """The order of the validation splits is not in ``validation``, and ``select_on`` may name another one."""
    scored = GOLD | {"z_good": [1, -1, 2, 0]}
    save(tmp_path, train={"text": texts(2), "z_good": [3.0, -6.0]}, a=scored, b=scored)
    fields: dict[str, Any] = {"logits": ["z_good"], "keep": "confident:0.6", "select_on": "a"}
    orders = [{"a": "a", "b": "b"}, {"b": "b", "a": "a"}]
    for calibrate in (False, True):
        one, other = (task(tmp_path, validation=own, calibrate=calibrate, **fields).spec() for own in orders)
        assert (key_of(one) != key_of(other)) == calibrate
    assert "fitted_on" in type(task(tmp_path, validation=orders[0], **fields)).example_fields, "and of its tokens"


def test_slices_of_one_unlabeled_file_do_not_validate(tmp_path: Path) -> None:
    """They once gave no labels beside N texts."""
    save(tmp_path, train={"text": texts(20), "p_bad": [0.9, 0.2] * 10, "p_good": [0.1, 0.8] * 10})
    own = task(tmp_path, probabilities=["p_bad", "p_good"], split_off=0.2, gold="evaluation", columns=["text"])
    with pytest.raises(UserError, match="has no labels"):
        own.examples(own.validation["validation"])


# --- Without gold labels anywhere


def test_without_any_gold_label_the_agreement_must_be_asked_for(tmp_path: Path) -> None:
    scored: Columns = {"text": texts(20), "p_bad": [0.9, 0.2] * 10, "p_good": [0.1, 0.8] * 10}
    folder = save(tmp_path, train=scored)
    with pytest.raises(UserError, match="to score the agreement"):
        task(folder, probabilities=["p_bad", "p_good"], split_off=0.2)
    own = task(folder, probabilities=["p_bad", "p_good"], split_off=0.2, gold="none")
    assert own.labels == ["bad", "good"]
    split = own.validation["validation"]
    assert len(own.examples(split)) == 4
    assert [int(text.split()[-1]) % 2 for text in own.examples(split).texts[0]] == own.examples(split).labels.tolist()
    assert "the agreement with these scores" in scores_line(own, None).warnings[0]
    answers = save(tmp_path / "a", train={"text": texts(20), "answer": ["no", "yes"] * 10})
    own = task(answers, answers=["answer"], split_off=0.2, gold="none")
    assert own.labels == ["no", "yes"]
    labels: Any = own.examples(own.train).labels
    assert np.bincount(labels).tolist() == [
        sum(int(text.split()[-1]) % 2 == label for text in own.examples(own.train).texts[0]) for label in (0, 1)
    ]


# --- Training


@pytest.fixture(scope="module")
def taught(compose: Compose, tiny_examples: dict[str, Examples], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of a student of predictions alone, and a folder whose training split has these instead of labels."""
    stage, pipeline = built(compose(*ALONE))
    outputs = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    train, validation = (tiny_examples[split] for split in ("train", "validation"))
    columns = {f"z_{name}": [repr(float(value)) for value in outputs[:, n]] for n, name in enumerate(("no", "yes"))}
    inputs = dict(zip(("sentence1", "sentence2"), train.texts, strict=True))
    assert validation.labels is not None
    labels = [["no", "yes"][label] for label in validation.labels]
    gold = {**dict(zip(("sentence1", "sentence2"), validation.texts, strict=True)), "label": labels}
    folder = save(tmp_path_factory.mktemp("scored"), train=inputs | columns, validation=gold)
    return load_file(pipeline.build(stage) / "model" / "model.safetensors"), folder


ALONE = ["method=rkd", "loss.eta=1", "teacher.optim.epochs=1", "optim.epochs=1"]


def built(run: RunConfig) -> tuple[Any, Pipeline]:
    stage, pipeline = resolve(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)
    pipeline.prepare(stage)
    pipeline.build(stage)
    return stage, pipeline


def test_scores_without_labels_train_the_same_student_to_the_bit(compose: Compose, taught: Any) -> None:
    reference, folder = taught
    stage, pipeline = built(
        compose(*ALONE, "teacher=labels", f"task.dataset={folder}", "task.labels=null", "task.logits=[z_no,z_yes]")
    )
    weights = load_file(pipeline.build(stage) / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())
    with pytest.raises(UserError, match="split 'train' has no gold labels, but this method reads them"):
        built(compose(*ALONE, "loss.eta=0.5", "teacher=labels", f"task.dataset={folder}", "task.logits=[z_no,z_yes]"))


def test_scores_of_a_transfer_set_train_the_same_student_to_the_bit(
    compose: Compose, taught: Any, tiny_task_folder: Path
) -> None:
    """The transfer set is the scored folder; the task's own training split has no scores at all."""
    _, folder = taught
    where = ["transfer=custom", f"transfer.parts.inputs.dataset={folder}"]
    where += ["transfer.parts.inputs.columns=[sentence1,sentence2]", "stages.student.transfer=${transfer}"]
    own = [*ALONE, *where]
    stage, pipeline = built(compose(*own))
    reference = load_file(pipeline.build(stage) / "model" / "model.safetensors")
    stage, pipeline = built(compose(*own, "teacher=labels", "task.logits=[z_no,z_yes]"))
    weights = load_file(pipeline.build(stage) / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


def test_missing_scores_of_an_ordinary_teacher_are_refused(
    compose: Compose, taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo once turned ``keep`` off, and all rows were used."""
    stage, pipeline = prepared(compose(*ALONE, "task.logits=[z_no,z_yess]", "task.keep=confident:0.8"))
    with pytest.raises(UserError, match="has no column 'z_"):
        pipeline.inputs.split(stage, stage.train_split)
    where = [f"task.dataset={taught[1]}", "teacher=labels", "task.labels=null", "task.logits=[z_no,z_yes]"]
    stage, pipeline = prepared(compose(*ALONE, *where))
    assert "z_no, z_yes" in str(*score_lines(stage, pipeline.inputs))
    monkeypatch.setattr(account, "is_downloaded", lambda *_: False)
    assert str(*score_lines(stage, pipeline.inputs)).endswith("is not downloaded yet"), "a plan downloads no table"


def prepared(run: RunConfig) -> tuple[Any, Pipeline]:
    return resolve(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)


def test_the_command_tells_what_it_took(tmp_path: Path, tiny_bert_folder: Path) -> None:
    train: Columns = {"text": texts(12), "p_bad": [0.9, 0.2, ""] * 4, "p_good": [0.1, 0.8, ""] * 4}
    save(tmp_path / "tickets", train=train, validation=GOLD | {"p_bad": [1, 0, 0, 1], "p_good": [0, 1, 1, 0]})
    ended = distill_run(
        tmp_path,
        "task=custom",
        "task.dataset=tickets",
        "task.probabilities=[p_bad,p_good]",
        "task.max_length=16",
        "teacher=labels",
        "method=kd",
        "student=truncated",
        "student.num_layers=2",
        f"teacher.source={tiny_bert_folder}",
        "optim.epochs=1",
        "store.dir=store",
        "runtime.device=cpu",
    )
    assert ended.code == 0, ended.err
    said = ended.out + ended.err
    assert "scores   p_bad, p_good = bad, good: 8 rows; 4 of 12 rows without a score left out" in said
    assert "validation: accuracy 100.0, ece 0.0; 100 % right of 4 with 99 to 100 %" in said.replace(
        ", 100 %", "; 100 %"
    )
