"""Made CSV files of scores and answers: what is taken, against independent shares, and what is refused, by row."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from distill_runner.common.errors import UserError
from distill_runner.tasks import make_task
from distill_runner.tasks.scores import scores_line
from helpers.columns import column_outputs

Columns = Mapping[str, Any]
CLASSES = ["bad", "good", "very good"]


def gold(names: Sequence[str]) -> Columns:
    return {"text": [f"other text {number}" for number in range(len(names))], "label": names}


def task_of(folder: Path, train: Columns, evaluation: Columns, **fields: Any) -> Any:
    for split, columns in (("train", train), ("validation", evaluation)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    plain = {"name": "own", "dataset": str(folder), "metrics": None, "max_length": 32, "epochs": 1}
    return make_task(**plain | {"validation": {"validation": "validation"}} | fields).resolved()


def texts(count: int) -> list[str]:
    return [f"text {number}" for number in range(count)]


def shares(outputs: np.ndarray) -> np.ndarray:
    values: np.ndarray = softmax(outputs.astype(np.float64), axis=1)
    return values


ANSWERS = st.sampled_from([*CLASSES, "Good", "BAD", "very_good", "", "unclear", "Unclear"])


@settings(max_examples=25)
@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(ANSWERS, min_size=k, max_size=k), min_size=1, max_size=8)))
def test_answers_become_shares(rows: list[list[str]]) -> None:
    """Of several samples, in any spelling; rows without any are left out, and counted."""
    rows = [["good"] * len(rows[0]), *rows]
    columns = [f"sample {number}" for number in range(len(rows[0]))]
    train = {"text": texts(len(rows)), **dict(zip(columns, zip(*rows, strict=True), strict=True))}
    expected, used = [], []
    for number, row in enumerate(rows):
        names = [word.lower().replace("_", " ") for word in row if word and word.lower() != "unclear"]
        if names:
            expected.append([names.count(name) / len(names) for name in CLASSES])
            used.append(f"text {number}")
    with TemporaryDirectory() as name:
        own = task_of(Path(name), train, gold(CLASSES), answers=columns, no_answer=["unclear"])
        assert own.labels == CLASSES
        np.testing.assert_allclose(shares(column_outputs(own)), expected, atol=1e-6)
        assert own.examples("train").texts == [used]
        line = str(scores_line(own, None))
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
        own = task_of(Path(name), train, gold(CLASSES), probabilities=columns)
        if is_valid.all():
            normalized = values / values.sum(1, keepdims=True)
            np.testing.assert_allclose(shares(column_outputs(own)), normalized, atol=2e-6)
            return
        row = 1 + int(np.flatnonzero(~is_valid)[0])
        with pytest.raises(UserError, match=f"row {row} of split 'train' has .* no probabilities") as refusal:
            column_outputs(own)
        assert len(str(refusal.value).splitlines()) == 2


@settings(max_examples=20)
@given(
    values=st.lists(st.floats(0, 1).map(lambda value: round(value, 4)), min_size=1, max_size=6),
    column=st.sampled_from(["p_bad", "good", "P(good)", "score"]),
)
def test_one_column_of_two_classes(values: list[float], column: str) -> None:
    with TemporaryDirectory() as name:
        own = task_of(
            Path(name), {"text": texts(len(values)), column: values}, gold(["bad", "good"]), probabilities=[column]
        )
        of_good = shares(column_outputs(own))[:, 1]
        expected = 1 - np.array(values) if column == "p_bad" else np.array(values)
        np.testing.assert_allclose(of_good, expected, atol=1e-6)
        assert f"{column} is that of {'bad' if column == 'p_bad' else 'good'}" in str(scores_line(own, None))


GOOD = [0.51, 0.92, 0.83, 0.74]
REST = [0.49, 0.08, 0.17, 0.26]
BOTH, TWO = {"probabilities": ["p_bad", "p_good"]}, gold(["bad", "good"])
PAIRS: list[tuple[list[Any], list[Any], str]] = [
    (["", "85%"], ["", "15%"], r"row 1 .* has '85%', not a .*\n.*no %"),
    (["0,1", 1], ["0,9", 0], r"row 0 .* has '0,1', .*\n.*no comma"),
    ([0.1, "NA"], [0.9, 1], r"row 1 .* has 'NA', .*\n.*empty"),
    (["inf", 0], [0, 1], "row 0 .* has 'inf', not a finite number"),
    (["", -0.1], [1, 1.1], r"row 1 .* has -0.1, 1.1, which are no probabilities"),
    ([0.5, 0.5], [0.8, 0.5], r"row 0 .* 0.5, 0.8, which are no probabilities\n.*sum 1"),
    ([-0.5, -0.1], [-0.9, -2.4], r"no probabilities\n.*task.logits"),
]
SETS: Columns = {"text": ["x", "y"], "bad": [0, 1], "good": [1, 1]}
WRONG: list[tuple[Columns, dict[str, Any], Columns, str]] = [
    *(({"p_bad": bad, "p_good": good}, BOTH, TWO, message) for bad, good, message in PAIRS),
    ({"p_good": ["", 50]}, {"probabilities": ["p_good"]}, TWO, r"row 1 .* has 50, which are .*\n.*by 100"),
    ({"p_good": [0.5, 1]}, {"probabilities": ["p_good"]}, gold(CLASSES), "1 column, but the task has 3"),
    (
        {"p_bad": ["", 1.5], "p_good": [1, 0.5]},
        {**BOTH, "type": "multilabel", "label": ["bad", "good"]},
        SETS,
        r"row 1 .* 1.5, 0.5, which are no",
    ),
    ({"a": ["I think it is good.", "bad"]}, {"answers": ["a"]}, TWO, "the answer 'I think it is good.'"),
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
    own = task_of(tmp_path, train, gold(["very bad", "very good"]), probabilities=columns)
    assert own.labels == names
    assert own.examples("validation").labels.tolist() == [1, 0]
    np.testing.assert_allclose(shares(column_outputs(own))[:, 0], GOOD, atol=1e-6)


def test_columns_of_other_classes_than_the_gold_labels(tmp_path: Path) -> None:
    train = {"text": texts(4), "p_a": REST, "p_b": GOOD}
    own = task_of(tmp_path, train, TWO, probabilities=["p_a", "p_b"])
    with pytest.raises(UserError, match=r"has the label 'bad', which is not among these labels\n.*\[bad,good\]"):
        own.examples("validation")
    named = task_of(tmp_path, train, TWO, probabilities=["p_a", "p_b"], labels=["bad", "good"])
    assert "p_a, p_b = bad, good" in str(scores_line(named, None))


@pytest.mark.parametrize("values", [(REST, GOOD), ([0.5, 1.7, -3, 2], GOOD)])
def test_probabilities_that_are_called_logits(values: tuple[list[float], list[float]], tmp_path: Path) -> None:
    own = task_of(
        tmp_path, {"text": texts(4), "z_bad": values[0], "z_good": values[1]}, TWO, logits=["z_bad", "z_good"]
    )
    warnings = scores_line(own, None).warnings
    assert any("as probabilities are" in warning for warning in warnings) == (values[0] is REST)


def test_swapped_columns_are_suspected(tmp_path: Path) -> None:
    """Where the validation split has them too; the columns' names do not tell it."""
    train = {"text": texts(4), "a": GOOD, "b": REST}
    scored = {**gold(["bad", "good"] * 2), "a": [0.1, 0.9, 0.2, 0.8], "b": [0.9, 0.1, 0.8, 0.2]}
    own = task_of(tmp_path, train, scored, probabilities=["a", "b"], labels=["bad", "good"])
    assert any("are columns swapped?" in warning for warning in scores_line(own, None).warnings)
