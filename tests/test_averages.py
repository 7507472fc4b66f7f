"""A column is a number over what it says it is over: splits and their means, test splits, averages over tasks."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.report.compare import compare
from distill_runner.report.formats import Line, notes, table_lines
from distill_runner.report.frame import ResultTable, tabulate
from distill_runner.report.published import Quantity, cells
from distill_runner.report.result import scores_on_validation
from distill_runner.tasks import make_task
from helpers.fake_results import point, predicted


def enumerated(text: str) -> list[str]:
    first, _, last = text.rpartition(" and ")
    return [*first.split("; " if "held out" in text else ", "), last]


def named_means(table: ResultTable) -> dict[str, list[str]]:
    """The columns that a table's notes call means, with the columns that they name."""
    told = (note.removesuffix(".").partition(": the mean of ") for note in notes(table) if ": the mean of " in note)
    return {name: enumerated(parts) for name, _, parts in told}


def value_lines(table: ResultTable) -> list[Line]:
    return [line for line in table_lines(table)[1] if not line.is_detail]


scores = st.floats(0, 1)
languages = st.dictionaries(st.sampled_from(["en", "es", "de"]), scores, min_size=2)
tasks = st.fixed_dictionaries(
    {"score": scores, "splits": st.none() | languages, "test": st.none() | languages, "held_out": st.booleans()}
)


def result(
    task: str,
    seed: int,
    score: float,
    splits: Mapping[str, float] | None,
    test: Mapping[str, float] | None,
    held_out: bool = False,
) -> Any:
    """A run of a task: with a column for each split if there are several, and with test splits."""
    parts = {
        name: {"score": part, "teacher_score": part / 2, "published": None} for name, part in (splits or {}).items()
    }
    data = {"validation": {name: name for name in splits or ["validation"]}, "scored_on": [*(splits or ["validation"])]}
    mean = fmean(splits.values()) if splits else score
    changes: dict[str, Any] = {
        "task": task,
        "seed": seed,
        "score": mean,
        "data": data,
        "splits": parts,
        "published": None,
    }
    if held_out:
        changes["data"] = data | {"select_on": "held_out", "hold_out": 0.1}
        changes["selection"] = {"on": "held_out examples", "score": score}
    if test:
        tested = {
            name: {"score": part, "teacher_score": None, "split": name, "content": "x"} for name, part in test.items()
        }
        own = {"metric": "accuracy", "score": fmean(test.values()), "teacher_score": None, "published": None}
        changes["test"] = {**own, "columns": [*test] if splits else [], "splits": tested}
    return point(**changes)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["rte", "cola", "mlqa", "own"]), tasks, min_size=1), st.booleans())
def test_an_average_is_the_mean_of_what_its_header_names(runs: dict[str, dict[str, Any]], two_seeds: bool) -> None:
    """A task's own column beside the columns of its splits counted twice: 6.32 in place of 6.96 on two languages."""
    table = tabulate([result(task, seed, **run) for task, run in runs.items() for seed in (1, 2)[: 1 + two_seeds]])
    columns, means = table_lines(table)[0], named_means(table)
    for held_out, suffix in ((False, ""), (True, ", held out")):
        chosen_so = [run for run in runs.values() if run["held_out"] == held_out]
        assert (f"average{suffix}" in columns) == (len(chosen_so) > 1)
        assert (f"average{suffix} test" in columns) == (sum(run["test"] is not None for run in chosen_so) > 1)
    for name, parts in means.items():
        assert len({*parts}) == len(parts)
        assert name in columns
        atoms = [atom for part in parts for atom in means.get(part, [part])]
        assert len({*atoms}) == len(atoms)  # nothing counts twice, not even through another mean
    (line,) = [line for line in value_lines(table) if line.name.startswith("alp")]
    assert not [name for name in columns if name.startswith("average") and name not in means]
    for name, parts in means.items():
        if all(part in line.values for part in parts):  # a test column of each split is only there if asked for
            assert line.values[name] == pytest.approx(fmean(line.values[part] for part in parts))
    for task, run in runs.items():
        selection = ", held out" * run["held_out"]
        for kind, suffix in (("splits", selection), ("test", f"{selection} test")):
            if split_scores := run[kind]:
                assert line.values[f"{task}{suffix}"] == pytest.approx(100 * fmean(split_scores.values()))
                assert means[f"{task}{suffix}"] == [f"{task}_{name}{suffix}" for name in split_scores]


def scored(monkeypatch: pytest.MonkeyPatch, stored: dict[str, float], **fields: Any) -> dict[str, Any]:
    """What a result says of a stage with these metrics in the store."""
    fields = {"name": "two", "dataset": "data", "columns": ["a", "b"], "max_length": 16, "epochs": 1} | fields
    task = make_task(**fields)
    numbers: list[Quantity] = []
    monkeypatch.setattr("distill_runner.report.result.measured_stage", lambda *_: {"metrics": stored})
    monkeypatch.setattr("distill_runner.report.result.published_number", lambda *args: numbers.append(args[-1]))
    stage: Any = SimpleNamespace(config=SimpleNamespace(task=task), first_teacher=None)
    return scores_on_validation(None, stage, None) | {"quantities": numbers}  # type: ignore[arg-type]


def test_two_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    """English selects, but the score is the mean of both; each number is looked up as what it is."""
    languages = {"en": "mlqa.en.en:validation", "es": "mlqa.es.es:validation"}
    fields = {"type": "questions", "validation": languages, "metrics": ["f1"], "by_split": True, "name": "mlqa"}
    found = scored(monkeypatch, {"f1": 0.0504, "en/f1": 0.0504, "es/f1": 0.0888}, **fields)
    assert found["score"] == found["metrics"]["f1"] == pytest.approx(0.0696)
    assert found["selection"] == {"on": "mlqa_en", "score": 0.0504}
    assert {name: part["score"] for name, part in found["splits"].items()} == {"en": 0.0504, "es": 0.0888}
    assert found["quantities"] == [
        Quantity("mlqa", ("en", "es"), "f1"),
        Quantity("mlqa", ("en",), "f1", is_part=True),
        Quantity("mlqa", ("es",), "f1", is_part=True),
    ]


@pytest.mark.parametrize(
    ("select_on", "by_split", "score", "scored_on"),
    [
        ("validation", True, 58.125, ["one", "two"]),  # 63.75 where the first split counted twice
        ("mean", True, 58.125, ["one", "two"]),
        ("mean", False, 58.125, ["one", "two"]),
        ("validation", False, 75.0, ["one"]),
        ("two", False, 41.25, ["two"]),
    ],
)
def test_two_splits_of_one_task(
    monkeypatch: pytest.MonkeyPatch, select_on: str, by_split: bool, score: float, scored_on: list[str]
) -> None:
    splits = {"one": 0.75, "two": 0.4125}
    fields = {"validation": {name: f"validation_{name}" for name in splits}, "metrics": ["accuracy"], "name": "rte"}
    task = make_task(
        dataset="d", columns=["a"], max_length=9, epochs=1, select_on=select_on, by_split=by_split, **fields
    )
    metrics = task.combined_metrics({name: {"accuracy": value} for name, value in splits.items()})
    found = scored(monkeypatch, metrics, select_on=select_on, by_split=by_split, **fields)
    assert 100 * found["score"] == pytest.approx(score)
    assert task.data_summary["scored_on"] == scored_on


def test_a_paper_s_own_row_has_the_paper_s_mean() -> None:
    """MiniLMv2's row of Table 6 for 6 layers from XLM-R-large, as a run would give it: 59.0, not 61.1."""
    row = {
        str(cell.task).removeprefix("mlqa_"): cell
        for cell in cells("minilmv2")
        if (cell.table, cell.method, cell.student, cell.teacher, cell.metric)
        == ("6", "minilmv2", "6x384", "XLM-R-large", "f1")
    }
    printed = row.pop("average")
    splits = {name: float(cell.value) / 100 for name, cell in row.items()}
    table = tabulate([result("mlqa", 1, 0.0, splits, splits)])
    line = next(line for line in value_lines(table) if line.name.startswith("alp"))
    assert round(line.values["mlqa"], 1) == round(line.values["mlqa test"], 1) == float(printed.value) == 59.0
    assert "average" not in table_lines(table)[0]
    assert round(100 * fmean([*splits.values(), splits["en"]]), 1) == 61.1


def of_test_split(test: float, content: str = "x", **changes: Any) -> dict[str, Any]:
    """A run of RTE with a score on a test split."""
    numbers = {"score": test, "teacher_score": None, "published": None}
    splits = {"test": {**numbers, "split": "test", "content": content, "metrics": {"accuracy": test}}}
    return point(**{"published": None, **changes}) | {
        "test": {**numbers, "metric": "accuracy", "others": [], "columns": [], "splits": splits}
    }


def test_a_grid_chooses_by_validation_and_shows_the_test_score_of_its_choice() -> None:
    """The second rate is better on the test split, and the second seed of the first rate is the best on validation."""
    runs = [
        of_test_split(0.50, lr=1e-5, seed=1, score=0.68),
        of_test_split(0.54, lr=1e-5, seed=2, score=0.72),
        of_test_split(0.90, lr=2e-5, seed=1, score=0.60),
        of_test_split(0.92, lr=2e-5, seed=2, score=0.64),
    ]
    table = tabulate(runs)
    (cells,) = table.rows.values()
    assert table.tasks == ["rte", "rte test"]
    assert [cell.kind for cell in cells.values()] == ["best mean of grid", "chosen by rte"]
    assert [cell.value for cell in cells.values()] == [pytest.approx(70), pytest.approx(52)]
    assert [cell.numbers["best_run"] for cell in cells.values()] == [pytest.approx(72), pytest.approx(54)]
    singles = [line.values for line in table_lines(table)[1] if line.name == "best single run"]
    assert singles == [{"rte": pytest.approx(72)}, {"rte test": pytest.approx(54)}]


def test_other_test_examples_make_a_row_of_their_own() -> None:
    """Two seeds on different test files under one name are no mean; the validation column is not concerned."""
    same = tabulate([of_test_split(0.5, seed=1), of_test_split(0.7, seed=2)])
    assert [cells["rte test"].value for cells in same.rows.values()] == [pytest.approx(60)]
    other = tabulate([of_test_split(0.5, seed=1), of_test_split(0.7, "y", seed=2)])
    by_column = {task: [cells[task] for cells in other.rows.values() if cells[task].points] for task in other.tasks}
    assert [cell.value for cell in by_column["rte test"]] == [pytest.approx(50), pytest.approx(70)]
    assert [len(cell.points[0].runs) for cell in by_column["rte"]] == [2]


def test_a_comparison_on_test_splits_reads_their_predictions(tmp_path: Path) -> None:
    """Each column is compared by the predictions for its own examples."""
    labels = np.arange(40) % 2
    runs = []
    for name, flipped in (("a", 4), ("b", 12)):
        of_test = np.where(np.arange(40) < flipped, 1 - labels, labels)
        run = predicted(tmp_path, name, labels, labels, method=name, mapping=None, attention=None, published=None)
        np.savez(tmp_path / name / "test-predictions-test.npz", outputs=np.eye(2)[of_test], labels=labels)
        extra = of_test_split(float((of_test == labels).mean()))["test"]
        runs.append(run | {"test": extra})
    found = {one.task: one for one in compare(tabulate(runs), ("a", "b"))}
    assert found["rte"].difference == pytest.approx(0)
    assert found["rte test"].difference == pytest.approx(100 * (36 - 28) / 40)
    examples = found["rte test"].examples
    assert examples is not None
    assert examples.p == pytest.approx(scipy.stats.binomtest(0, 8).pvalue)  # 8 of 40 differ, all in one direction
