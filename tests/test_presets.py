"""Recipes are well-formed, and ALP-KD's has the hyper-parameters that the paper prints."""

from pathlib import Path

import pytest
import yaml

TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]
CONF = Path(__file__).parents[1] / "conf"
RECIPES = sorted((CONF / "recipe").rglob("*.yaml"))
ALP_KD = CONF / "recipe" / "alp_kd.yaml"

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


def test_alp_kds_recipe_is_the_printed_hyper_parameters() -> None:
    """Read by a YAML 1.1 loader, to which 2e-5 would be a string."""
    recipe = yaml.safe_load(ALP_KD.read_text())
    assert set(recipe) == {*PRINTED, "paper", "says", "tasks", "assumptions"}
    for method, columns in PRINTED.items():
        assert list(recipe[method]) == TASKS
        for index, task in enumerate(TASKS):
            chosen = recipe[method][task]
            assert all(type(value) is float for value in chosen.values()), (method, task)
            assert chosen == {name: values[index] for name, values in columns.items()}, (method, task)
            assert chosen.get("eta", 0) + chosen.get("lambda", 0) <= 1


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_well_formed(file: Path) -> None:
    assert file.read_text().startswith("# @package recipe\n")
    recipe = yaml.safe_load(file.read_text())
    assert {"paper", "says", "tasks"} <= set(recipe)
    tasks = {path.stem for path in (CONF / "task").glob("[!_]*.yaml")}
    assert set(recipe["tasks"]) <= {*tasks, "${task.name}"}, "that is every task"
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")} | {"teacher", "task", "every"}
    for name, of_tasks in recipe.items():
        if name not in ("paper", "says", "tasks", "assumptions"):
            assert name in methods, name
            assert set(of_tasks) <= {*tasks, "every"}, name
            for key, value in ((key, value) for chosen in of_tasks.values() for key, value in chosen.items()):
                assert key != "lr" or type(value) is float or str(value).startswith("${"), "2e-5 needs a dot"
