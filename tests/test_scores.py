"""Scores of another model in columns of the data, and training data without gold labels."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
from distill_runner.pipeline.account import score_line
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store, key_of
from distill_runner.pipeline.targets import targets_spec
from distill_runner.tasks import make_task
from distill_runner.tasks.decoding import class_loss
from distill_runner.tasks.scores import scores_line
from helpers.columns import column_outputs

Compose = Callable[..., RunConfig]
Columns = dict[str, Any]


def save(folder: Path, **splits: Columns) -> Path:
    """A folder with a CSV file for each split."""
    folder.mkdir(exist_ok=True)
    for split, columns in splits.items():
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return folder


def texts(count: int) -> list[str]:
    return [f"text {number}" for number in range(count)]


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


@pytest.mark.parametrize("form", ["p_{}", "{}_prob", "{}Score", "logit.{}.mean"])
def test_columns_in_another_order_than_the_classes_are_refused(form: str, tmp_path: Path) -> None:
    good, bad = map(form.format, ("good", "bad"))
    train: Columns = {"text": texts(4), "label": GOLD["label"], good: [0.5] * 4, bad: [0.5] * 4}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=[good, bad])
    with pytest.raises(UserError, match=rf"another order than the classes, bad, good\n.*\[{bad},{good}\]"):
        column_outputs(own)


@pytest.mark.parametrize(("column", "of"), [("p_bad", 0), ("p_good", 1), ("score", 1), ("bad_score", 0)])
def test_one_column_is_that_of_the_class_it_names_or_of_the_second(tmp_path: Path, column: str, of: int) -> None:
    own = task(save(tmp_path, train={"text": texts(2), column: [0.9, 0.25]}, validation=GOLD), probabilities=[column])
    np.testing.assert_allclose(softmax(column_outputs(own))[:, of], [0.9, 0.25], atol=1e-7)
    assert f"{column} is that of {['bad', 'good'][of]}" in str(scores_line(own, None))


def test_percentages_are_divided_by_100(tmp_path: Path) -> None:
    train: Columns = {"text": texts(2), "bad": [85, 10], "good": [15, 90]}
    own = task(save(tmp_path, train=train, validation=GOLD), probabilities=["bad", "good"])
    np.testing.assert_allclose(softmax(column_outputs(own)), [[0.85, 0.15], [0.1, 0.9]], atol=1e-7)


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
    cells = [row.split(",") for row in ["0.3,0.7", "0.1,0.9", *rows]]
    train: Columns = {
        "text": texts(len(cells)),
        "p_bad": [row[0] for row in cells],
        "p_good": [row[1] for row in cells],
    }
    folder = save(tmp_path, train=train, validation=GOLD)
    for keep, least in ((None, 0.0), ("confident:0.5", 0.5), ("confident:0.65", 0.65), ("confident:0.9", 0.9)):
        own = task(folder, probabilities=["p_bad", "p_good"], keep=keep)
        full = [all(cell not in ("", "nan") for cell in row) and max(map(float, row)) >= least for row in cells]
        examples, outputs = own.examples("train"), column_outputs(own)
        assert examples.texts == [[text for text, one in zip(texts(len(cells)), full, strict=True) if one]]
        expected = [list(map(float, row)) for row, one in zip(cells, full, strict=True) if one]
        np.testing.assert_allclose(softmax(outputs), expected, atol=1e-6)


# --- Made files


def gold_of(names: Sequence[str]) -> Columns:
    return {"text": [f"other text {number}" for number in range(len(names))], "label": names}


def task_of(folder: Path, train: Columns, evaluation: Columns, **fields: Any) -> Any:
    return task(save(folder, train=train, validation=evaluation), **fields)


CLASSES = ["bad", "good", "very good"]
OBJECTS = {
    '{"label": "Good"}': "good",
    '{"label": "bad", "reason": "It is good for nothing."}': "bad",
    '```json\n{"confidence": 0.9, "answer": "Very good."}\n```': "very good",
    'Sure:\n```json\n{"label": "bad"}\n```\nLet me know.': "bad",
    '{"answer": "unclear"}': "unclear",
}
ANSWERS = st.sampled_from(
    [*CLASSES, "Good", "BAD", "very_good", "", "unclear", "Good.", '"bad"', "**Very good**.", "'good'!", *OBJECTS]
)


@settings(max_examples=25)
@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(ANSWERS, min_size=k, max_size=k), min_size=1, max_size=8)))
def test_answers_become_shares(rows: list[list[str]]) -> None:
    """Of several samples, in any spelling; rows without any are left out, and counted."""
    rows = [["good"] * len(rows[0]), *rows]
    columns = [f"sample {number}" for number in range(len(rows[0]))]
    train = {"text": texts(len(rows)), **dict(zip(columns, zip(*rows, strict=True), strict=True))}
    expected, used, answers, num_variants = [], [], list[str](), 0
    for number, row in enumerate(rows):
        plain = [OBJECTS.get(word, word).lower().replace("_", " ").strip("\"'*.!") for word in row]
        names = [word for word in plain if word and word != "unclear"]
        if names:
            expected.append([names.count(name) / len(names) for name in CLASSES])
            used.append(f"text {number}")
        answers += names
        num_variants += sum(word not in CLASSES for word, own in zip(row, plain, strict=True) if own in CLASSES)
    with TemporaryDirectory() as name:
        own = task_of(Path(name), train, gold_of(CLASSES), answers=columns, no_answer=["unclear"])
        assert own.labels == CLASSES
        np.testing.assert_allclose(softmax(column_outputs(own)), expected, atol=1e-6)
        assert own.examples("train").texts == [used]
        line = str(scores_line(own, None))
    assert f"answers: {', '.join(f'{name} {answers.count(name)}' for name in CLASSES)}" in line
    unread = len(rows) * len(columns) - len(answers)
    assert (f"{num_variants} in another spelling: " in line) == (num_variants > 0)
    assert (f"{unread} are empty or in task.no_answer" in line) == (unread > 0)
    missing = len(rows) - len(used)
    assert (f"{missing} of {len(rows)} rows without an answer left out" in line) == (missing > 0)


@settings(max_examples=25)
@given(
    weights=st.lists(st.lists(st.integers(1, 99), min_size=3, max_size=3), min_size=1, max_size=6),
    digits=st.integers(2, 4),
    error=st.sampled_from([0.0, 0.001, 0.01, 0.014, 0.016, 0.3, -0.2]),
    form=st.sampled_from(["{:.6f}", " {:.6f} ", "{:e}"]),
)
def test_rounded_sums_are_normalized_and_others_refused(
    weights: list[list[int]], digits: int, error: float, form: str
) -> None:
    """Within 0.005 for each class: 0.015 of three. The row that is named is that of the file, also after empty ones."""
    rows = [[round(own / sum(row), digits) for own in row] for row in weights]
    rows[-1] = [rows[-1][0], rows[-1][1], 1 + error - rows[-1][0] - rows[-1][1]]
    cells = [["", "", ""], *([form.format(value) for value in row] for row in rows)]
    columns = ["p_bad", "p_good", "p_very_good"]
    train = {"text": texts(len(cells)), **dict(zip(columns, zip(*cells, strict=True), strict=True))}
    values = np.array([[float(cell) for cell in row] for row in cells[1:]])
    is_valid = (np.abs(values.sum(1) - 1) <= 0.015) & (values >= 0).all(1)
    with TemporaryDirectory() as name:
        own = task_of(Path(name), train, gold_of(CLASSES), probabilities=columns)
        if is_valid.all():
            normalized = values / values.sum(1, keepdims=True)
            np.testing.assert_allclose(softmax(column_outputs(own)), normalized, atol=2e-6)
            return
        row = 1 + int(np.flatnonzero(~is_valid)[0])
        with pytest.raises(UserError, match=f"row {row} of split 'train' has .* no probabilities") as refusal:
            column_outputs(own)
        assert len(str(refusal.value).splitlines()) == 2


GOOD = [0.51, 0.92, 0.83, 0.74]
REST = [0.49, 0.08, 0.17, 0.26]
BOTH, TWO = {"probabilities": ["p_bad", "p_good"]}, gold_of(["bad", "good"])
PAIRS: list[tuple[list[Any], list[Any], str]] = [
    (["", "85%"], ["", "15%"], r"row 1 .* has '85%', not a .*\n.*no %"),
    (["0,1", 1], ["0,9", 0], r"row 0 .* has '0,1', .*\n.*no comma"),
    ([0.1, "NA"], [0.9, 1], r"row 1 .* has 'NA', .*\n.*empty"),
    (["inf", 0], [0, 1], "row 0 .* has 'inf', not a finite number"),
    (["-inf", 0], [0, 1], "row 0 .* has '-inf', not a finite number.*\n.*-30 for -inf"),
    (["", -0.1], [1, 1.1], r"row 1 .* has -0.1, 1.1, which are no probabilities"),
    ([0.5, 0.5], [0.8, 0.5], r"row 0 .* 0.5, 0.8, which are no probabilities\n.*sum 1"),
    ([-0.5, -0.1], [-0.9, -2.4], r"no probabilities\n.*task.logits"),
]
SETS: Columns = {"text": ["x", "y"], "bad": [0, 1], "good": [1, 1]}
WRONG: list[tuple[Columns, dict[str, Any], Columns, str]] = [
    *(({"p_bad": bad, "p_good": good}, BOTH, TWO, message) for bad, good, message in PAIRS),
    ({"p_good": ["", 50]}, {"probabilities": ["p_good"]}, TWO, r"row 1 .* has 50, which are .*\n.*by 100"),
    ({"p_good": [0.5, 1]}, {"probabilities": ["p_good"]}, gold_of(CLASSES), "1 column, but the task has 3"),
    (
        {"p_bad": ["", 1.5], "p_good": [1, 0.5]},
        {**BOTH, "type": "multilabel", "label": ["bad", "good"]},
        SETS,
        r"row 1 .* 1.5, 0.5, which are no",
    ),
    ({"a": ["I think it is good.", "bad"]}, {"answers": ["a"]}, TWO, "the answer 'I think it is good.'.*\n.*bad, good"),
    (
        {"p_bad": [80, 5], "p_good": [20, 95]},
        {"logits": ["p_bad", "p_good"]},
        TWO,
        r"these are .*\n.*task.probabilities",
    ),
    ({"p_bad": [0.8, ""], "p_good": [0.1, ""]}, BOTH, TWO, r"row 0 .* 0.8, 0.1, .*\n.*set task.top_k"),
]


@pytest.mark.parametrize(("columns", "fields", "evaluation", "message"), WRONG)
def test_wrong_scores_are_refused_in_two_lines(
    columns: Columns, fields: dict[str, Any], evaluation: Columns, message: str, tmp_path: Path
) -> None:
    own = task_of(tmp_path, {"text": texts(2), **columns}, evaluation, **fields)
    with pytest.raises(UserError, match=message) as refusal:
        column_outputs(own)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.parametrize("mark", ["p_", "p ", "prob of ", "", "score: "])
def test_columns_name_classes_of_several_words(mark: str, tmp_path: Path) -> None:
    """The gold labels say which part of a column's name is the class; once "very bad" became "bad"."""
    names = ["very good", "very bad"]
    columns = [f"{mark}{name}" for name in names]
    train = {"text": texts(4), columns[0]: GOOD, columns[1]: REST}
    own = task_of(tmp_path, train, gold_of(["very bad", "very good"]), probabilities=columns)
    assert own.labels == names
    assert own.examples("validation").labels.tolist() == [1, 0]
    np.testing.assert_allclose(softmax(column_outputs(own))[:, 0], GOOD, atol=1e-6)


def test_columns_of_other_classes_than_the_gold_labels(tmp_path: Path) -> None:
    train = {"text": texts(4), "p_a": REST, "p_b": GOOD}
    own = task_of(tmp_path, train, TWO, probabilities=["p_a", "p_b"])
    with pytest.raises(UserError, match=r"has the label 'bad', which is not among these labels\n.*\[bad,good\]"):
        own.examples("validation")
    named = task_of(tmp_path, train, TWO, probabilities=["p_a", "p_b"], labels=["bad", "good"])
    assert "p_a, p_b = bad, good" in str(scores_line(named, None))


def test_several_answers_are_no_list(tmp_path: Path) -> None:
    own = task_of(tmp_path, {"text": texts(4), "a": [["bad", "good"]] * 4}, TWO, answers=["a"])
    with pytest.raises(UserError, match=r"has the answer .*\n.*task\.answers=\[<one>,<other>\]"):
        scores_line(own, None)


@pytest.mark.parametrize("values", [(REST, GOOD), ([0.1, 0.2, 0, 0], GOOD), ([0.5, 1.7, -3, 2], GOOD)])
def test_probabilities_that_are_called_logits_are_refused(values: tuple[Any, Any], tmp_path: Path) -> None:
    columns = {"text": texts(4), "z_bad": values[0], "z_good": values[1]}
    own = task_of(tmp_path, columns, TWO, logits=["z_bad", "z_good"])
    if min(values[0]) < 0:
        np.testing.assert_array_equal(column_outputs(own), np.array(values, dtype=np.float32).T)
        return
    with pytest.raises(UserError, match=r"task\.logits=.*\n.*task\.probabilities=\[z_bad,z_good\]"):
        scores_line(own, None)


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ([0.9, 0.1], ""),
        ({"Good": 0.1, "bad": 0.9}, ""),
        ([{"label": "good", "score": 0.1}, {"label": "bad", "score": 0.9}], ""),
        ([0.9, 0.05, 0.05], "not a finite number for each output"),
        ({"bad": 0.9, "fine": 0.1}, "not a finite number for each output"),
        ([0.9, None], "not a finite number for each output"),
        ([0.9, 0.3], "no probabilities"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_a_column_of_lists_or_objects(first: Any, problem: str, form: str, tmp_path: Path) -> None:
    import pandas

    second: Any = {"bad": 0.2, "Good": 0.8} if isinstance(first, dict) else [0.2, 0.8]
    if isinstance(first, list) and isinstance(first[0], dict):  # as a pipeline of transformers gives them
        second = [{"label": "bad", "score": 0.2}, {"label": "good", "score": 0.8}]
    train = pandas.DataFrame({"text": texts(3), "probs": [first, None, second]})
    save(tmp_path, validation=TWO)
    if form == "jsonl":
        train.to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    elif form == "csv":
        train.to_csv(tmp_path / "train.csv", index=False)
    else:
        train.to_parquet(tmp_path / "train.parquet")
    own = task(tmp_path, probabilities=["probs"])
    if problem:
        with pytest.raises(UserError, match=problem) as refusal:
            column_outputs(own)
        assert len(str(refusal.value).splitlines()) <= 2
        return
    np.testing.assert_allclose(softmax(column_outputs(own)), [[0.9, 0.1], [0.2, 0.8]], atol=1e-6)
    assert "in the order bad, good" in str(scores_line(own, None))


@pytest.mark.parametrize(
    ("top_k", "expected", "words"),
    [
        ("spread", [0.9, 0.05, 0.05], "1 row without some classes, which get equal parts of the rest of 1"),
        ("drop", [1, 0, 0], "1 row without some classes, which get nothing"),
        (None, None, r"not a finite number for each output\n.*task\.top_k=spread"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "columns"])
def test_the_top_classes_alone(top_k: str | None, expected: Any, words: str, form: str, tmp_path: Path) -> None:
    """Parquet and columns have empty cells where JSON has no key."""
    import pandas

    rows = [{"bad": 0.9}, {"bad": 0.2, "fair": 0.3, "good": 0.5}]
    names, train = ["bad", "fair", "good"], pandas.DataFrame({"text": texts(2), "probs": rows})
    if form == "columns":
        train = pandas.DataFrame({"text": texts(2)} | {f"p_{name}": [row.get(name) for row in rows] for name in names})
    save(tmp_path, validation=gold_of(names))
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": "a", "probs": row}) for row in rows))
    if form != "jsonl":
        (tmp_path / "train.jsonl").unlink()
        train.to_parquet(tmp_path / "train.parquet")
    columns = [f"p_{name}" for name in names] if form == "columns" else ["probs"]
    own = task(tmp_path, probabilities=columns, top_k=top_k)
    if top_k is not None:
        np.testing.assert_allclose(softmax(column_outputs(own)), [expected, [0.2, 0.3, 0.5]], atol=1e-6)
        assert words in str(scores_line(own, None))
    elif form != "columns":
        with pytest.raises(UserError, match=words):
            column_outputs(own)
    else:
        assert "1 of 2 rows without a score left out" in str(scores_line(own, None))


@pytest.mark.parametrize("parts", [{"bad": 0.8, "fine": 0.1}, {"bad": 1.2}, {"bad": 80}, {"bad": 0.0}, {"bad": -0.1}])
@pytest.mark.parametrize("top_k", ["spread", "drop"])
def test_wrong_top_classes_are_refused(parts: dict[str, float], top_k: str, tmp_path: Path) -> None:
    save(tmp_path, validation=TWO)
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a", "probs": parts}))
    own = task(tmp_path, probabilities=["probs"], top_k=top_k)
    if (parts, top_k) == ({"bad": 0.0}, "spread"):
        np.testing.assert_allclose(softmax(column_outputs(own)), [[0, 1]], atol=1e-6)
        return
    with pytest.raises(UserError, match=r"no probabilities|not a finite number for each"):
        column_outputs(own)


# --- Quality


def test_quality_before_training_by_hand(tmp_path: Path) -> None:
    scored = GOLD | {"p_bad": [0.9, 0.95, 0.3, 0.8], "p_good": [0.1, 0.05, 0.7, 0.2]}
    train: Columns = {"text": texts(2), "p_bad": [0.5, 0.5], "p_good": [0.5, 0.5]}
    own = task(save(tmp_path, train=train, validation=scored), probabilities=["p_bad", "p_good"])
    measured = scores_line(own, None).details["quality"]["validation"]
    assert measured["accuracy"] == 0.75
    # Bins of 1/15: 0.9 in the 14th (right), 0.95 in the 15th (wrong), 0.7 in the 11th, 0.8 in the 13th (both right).
    assert measured["ece"] == pytest.approx((0.1 + 0.95 + 0.3 + 0.2) / 4)
    swapped = scored | {"p_bad": scored["p_good"], "p_good": scored["p_bad"]}
    own = task(save(tmp_path, train=train, validation=swapped), probabilities=["p_bad", "p_good"])
    assert any("are columns swapped?" in warning for warning in scores_line(own, None).warnings)
    blank = GOLD | {"p_bad": ["", "", "0.5", ""], "p_good": ["", "0.5", "", ""]}
    own = task(save(tmp_path, train=train, validation=blank), probabilities=["p_bad", "p_good"])
    assert "validation has none, so that their quality is unknown" in str(scores_line(own, None))
    answered = GOLD | {"answer": ["", "unclear"] * 2}
    save(tmp_path, train={"text": texts(2), "answer": ["bad", "good"]}, validation=answered)
    assert "validation has none" in str(scores_line(task(tmp_path, answers=["answer"], no_answer=["unclear"]), None))
    own = task_of(tmp_path, {"text": texts(2), "sure": [0.9, 0.6]}, TWO, probabilities=["sure"])
    assert any("favor good in all rows" in warning for warning in scores_line(own, None).warnings)


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


def test_answers_have_no_temperature(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs probabilities or raw outputs, and gold labels"):
        task(save(tmp_path, train=GOLD | {"a": GOLD["label"]}, validation=GOLD), answers=["a"], calibrate=True)


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
    with pytest.raises(UserError, match="take the labels from the scores"):
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
    stage, pipeline = resolve_stage(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)
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
    assert "z_no, z_yes" in str(score_line(stage, pipeline.inputs))
    monkeypatch.setattr(account, "is_downloaded", lambda *_: False)
    assert str(score_line(stage, pipeline.inputs)).endswith("is not downloaded yet"), "a plan downloads no table"


def prepared(run: RunConfig) -> tuple[Any, Pipeline]:
    return resolve_stage(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)
