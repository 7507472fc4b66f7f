"""The presets are the hyper-parameters that the ALP-KD paper prints."""

from pathlib import Path

import yaml

TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]
PRESETS = Path(__file__).parents[1] / "conf" / "presets" / "alp_kd.yaml"

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
