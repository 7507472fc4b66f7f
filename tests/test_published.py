"""The transcription of the paper's tables: complete, and consistent with the averages it prints itself."""

from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from distill_runner.report.published import Cell, cells, find

TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]
PRESETS = Path(__file__).parents[1] / "conf" / "presets" / "alp_kd.yaml"
Key = tuple[int, str, str | None, str | None, int | None]


def rows() -> dict[Key, dict[str, Cell]]:
    """Table, method, mapping, attention, heads -> task -> cell."""
    found: dict[Key, dict[str, Cell]] = defaultdict(dict)
    for cell in cells("alp_kd"):
        key = (cell.table, cell.method, cell.mapping, cell.attention, cell.heads)
        assert cell.task not in found[key], f"{key} {cell.task} stands there twice"
        found[key][cell.task] = cell
    return found


def test_every_cell_of_every_table_is_there() -> None:
    assert Counter(key[0] for key in rows()) == {1: 9, 2: 9, 3: 8, 4: 6}  # rows that the paper prints
    assert Counter(cell.table for cell in cells("alp_kd")) == {1: 81, 2: 81, 3: 72, 4: 54}  # 8 tasks, average
    assert all(list(row) == [*TASKS, "average"] for row in rows().values())


def test_printed_averages_are_those_of_the_cells() -> None:
    """The paper makes no slip here: each average agrees to half a unit of its last digit, and float error."""
    for key, row in rows().items():
        assert fmean(row[task].value for task in TASKS) == pytest.approx(row["average"].value, abs=0.005001), key


def test_columns() -> None:
    depth = {1: 4, 2: 6, 3: 2, 4: 4}
    for cell in cells("alp_kd"):
        teacher = cell.method == "teacher"
        assert cell.num_layers == (12 if teacher else depth[cell.table])
        assert cell.student == (None if teacher else f"BERT-{depth[cell.table]}")
        assert cell.metric == {"cola": "matthews", "stsb": "pearson", "average": "mean"}.get(cell.task, "accuracy")
        assert (cell.attention is None) == (cell.method != "alp")
        assert (cell.heads is None) == (cell.table != 4)
        assert (cell.mapping is None) == (cell.method in ("teacher", "nkd", "rkd"))


BERT = "google-bert/bert-base-uncased"


@pytest.mark.parametrize(
    ("query", "value", "table"),
    [
        ({"method": "teacher", "task": "rte", "num_layers": 12}, 68.23, 1),
        ({"method": "nkd", "task": "cola", "num_layers": 4}, 31.05, 1),
        ({"method": "rkd", "task": "stsb", "num_layers": 6}, 88.70, 2),
        ({"method": "pkd", "task": "rte", "num_layers": 4, "mapping": "skip"}, 65.70, 1),
        ({"method": "pkd", "task": "stsb", "num_layers": 2, "mapping": "layer:12"}, 45.39, 3),
        ({"method": "pkd", "task": "qqp", "num_layers": 2, "mapping": "layer:6"}, 87.70, 3),
        ({"method": "pkd", "task": "sst2", "num_layers": 2, "mapping": "skip"}, 88.76, 3),
        ({"method": "ckd", "task": "mnli", "num_layers": 4, "mapping": "po"}, 79.53, 1),
        ({"method": "ckd", "task": "qnli", "num_layers": 2, "mapping": "no"}, 81.60, 3),
        ({"method": "alp", "task": "rte", "num_layers": 4, "mapping": "all", "attention": "dot"}, 67.15, 1),
        ({"method": "alp", "task": "mrpc", "num_layers": 6, "mapping": "no", "attention": "dot"}, 85.78, 2),
        (
            {
                "method": "alp",
                "task": "rte",
                "num_layers": 4,
                "mapping": "all",
                "attention": "kqv",
                "heads": 4,
            },
            67.31,
            4,
        ),
        (
            {
                "method": "alp",
                "task": "sst2",
                "num_layers": 4,
                "mapping": "po",
                "attention": "kqv",
                "heads": 1,
            },
            89.04,
            4,
        ),
        (
            {"method": "alp", "task": "average", "num_layers": 4, "mapping": "all", "attention": "dot"},
            77.01,
            1,
        ),
    ],
)
def test_a_result_finds_its_number(query: dict[str, Any], value: float, table: int) -> None:
    found = find(**query, teacher=BERT)
    assert found is not None
    assert (found.value, found.source, found.comparable) == (value, f"ALP-KD Table {table}", True)


def test_settings_that_a_method_ignores_do_not_hide_its_number() -> None:
    found = find("rkd", "rte", num_layers=4, teacher=BERT, mapping="all", attention="dot", heads=4)
    assert found is not None
    assert found.value == 65.34


@pytest.mark.parametrize(
    ("teacher", "comparable"),
    [
        ("bert_base", True),
        ("bert-base-uncased", True),
        ("models/bert-base-cased-finetuned-rte", True),
        ("google/bert_uncased_L-12_H-768_A-12", True),
        ("google/bert_uncased_L-4_H-768_A-12", False),
        ("bert-large-uncased", False),
        ("bert-base-multilingual-cased", False),
        ("distilbert-base-uncased", False),
        ("roberta-base", False),
        ("minilm_l6", False),
    ],
)
def test_another_teacher_makes_a_number_a_reference(teacher: str, comparable: bool) -> None:
    found = find("nkd", "rte", num_layers=4, teacher=teacher)
    assert found is not None
    assert (found.value, found.comparable) == (61.73, comparable)


@pytest.mark.parametrize(("num_layers", "table"), [(1, 3), (3, 1), (5, 2), (9, 2)])
def test_another_depth_takes_the_nearest_as_a_reference(num_layers: int, table: int) -> None:
    found = find("nkd", "rte", num_layers=num_layers, teacher=BERT)
    assert found is not None
    assert (found.source, found.comparable) == (f"ALP-KD Table {table}", False)


def test_another_metric_is_not_comparable() -> None:
    found = find("nkd", "mrpc", num_layers=4, teacher=BERT, metric="f1")
    assert found is not None
    assert (found.metric, found.comparable) == ("accuracy", False)


@pytest.mark.parametrize(
    "query",
    [
        {"method": "nkd", "task": "wnli"},
        {"method": "takd", "task": "rte"},
        {"method": "pkd", "task": "rte", "mapping": "layer:3"},
        {"method": "alp", "task": "rte", "mapping": "all", "attention": "kqv", "heads": 2},
    ],
)
def test_what_the_paper_does_not_print_is_none(query: dict[str, Any]) -> None:
    assert find(**query, num_layers=4, teacher=BERT) is None


# Tables 5 to 10, row by row as printed.
PRINTED: dict[str, dict[str, list[float]]] = {
    "teacher": {"lr": [2e-5, 5e-5, 2e-5, 2e-5, 2e-5, 2e-5, 2e-5, 2e-5]},
    "nkd": {"lr": [2e-5, 5e-5, 2e-5, 2e-5, 5e-5, 2e-5, 5e-5, 5e-5]},
    "rkd": {
        "lr": [2e-5, 5e-5, 2e-5, 5e-5, 5e-5, 5e-5, 5e-5, 5e-5],
        "temperature": [10, 20, 10, 20, 20, 5, 10, 5],
        "eta": [0.5, 0.7, 0.5, 0.7, 0.7, 0.7, 0.7, 0.2],
    },
    "pkd": {
        "lr": [2e-5, 5e-5, 5e-5, 5e-5, 5e-5, 2e-5, 5e-5, 5e-5],
        "temperature": [5, 20, 5, 20, 20, 5, 5, 5],
        "eta": [0.5, 0.2, 0.2, 0.2, 0.5, 0.2, 0.2, 0.2],
        "lambda": [0.2, 0.7, 0.7, 0.7, 0.2, 0.7, 0.7, 0.2],
    },
    "ckd": {
        "lr": [5e-5, 5e-5, 2e-5, 5e-5, 5e-5, 5e-5, 5e-5, 5e-5],
        "temperature": [20, 10, 10, 20, 5, 10, 20, 20],
        "eta": [0.2, 0.5, 0.7, 0.7, 0.2, 0.2, 0.5, 0.2],
        "lambda": [0.2] * 8,
    },
    "alp": {
        "lr": [5e-5] * 8,
        "temperature": [5, 20, 10, 20, 20, 10, 20, 5],
        "eta": [0.2, 0.7, 0.7, 0.7, 0.7, 0.2, 0.2, 0.2],
        "lambda": [0.5, 0.2, 0.2, 0.2, 0.2, 0.2, 0.7, 0.5],
    },
}


def test_presets_are_the_printed_hyper_parameters() -> None:
    """Read by a YAML 1.1 loader, to which 2e-5 would be a string."""
    presets = yaml.safe_load(PRESETS.read_text())
    assert list(presets) == list(PRINTED)
    for method, columns in PRINTED.items():
        assert list(presets[method]) == TASKS
        for index, task in enumerate(TASKS):
            preset = presets[method][task]
            assert all(type(value) is float for value in preset.values()), (method, task)
            assert preset == {name: values[index] for name, values in columns.items()}, (method, task)
            assert preset.get("eta", 0) + preset.get("lambda", 0) <= 1


def test_presets_say_where_they_belong() -> None:
    assert PRESETS.read_text().startswith("# @package presets\n")
