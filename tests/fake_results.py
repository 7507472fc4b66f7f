"""Results as runs leave them, for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np


def result(**changes: Any) -> dict[str, Any]:
    return {
        "key": "0a1b2c3d",
        "status": "done",
        "task": "rte",
        "method": "alp",
        "mapping": "all",
        "attention": "dot",
        "seed": 1,
        "metric": "accuracy",
        "score": 0.6643,
        "metrics": {"accuracy": 0.6643, "f1": 0.6512},
        "best_epoch": 12,
        "epochs": 20,
        "teacher": "bert_base",
        "teacher_score": 0.6823,
        "student": {"num_layers": 4, "width": 768, "init": "first"},
        "num_params": 52_780_000,
        "examples_per_second": 412.4,
        "seconds": 1100.0,
        "published": {"value": 67.15, "metric": "accuracy", "source": "ALP-KD Table 1", "comparable": True},
        "readings": ["kd is scaled by T²"],
        "folder": "outputs/0a1b2c3d",
        "dataset": "nyu-mll/glue",
        "command": "distill-run task=rte method=alp seed=1",
    } | changes


def failed(**changes: Any) -> dict[str, Any]:
    """A failed run knows only what it was asked to do."""
    keys = ("key", "task", "method", "mapping", "attention", "seed", "folder")
    known = {key: value for key, value in result().items() if key in keys}
    return known | {"status": "failed", "error": "loss kd is NaN at step 12\nTraceback"} | changes


def point(lr: float = 1e-5, seed: int = 1, score: float = 0.6, **changes: Any) -> dict[str, Any]:
    """A finished run of a grid over the learning rate, with a key of its own."""
    made = {"settings": {"optim.lr": lr, "optim.epochs": 3}, "seed": seed, "score": score} | changes
    return result(**made, key=json.dumps(made, sort_keys=True))


def run_folder(root: Path, name: str, **files: Any) -> Path:
    """A run's folder with ``<key>.json`` for each argument: as JSON, or as it is if it is text."""
    folder = root / name
    folder.mkdir(parents=True)
    for key, content in files.items():
        (folder / f"{key}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def predicted(root: Path, name: str, predictions: np.ndarray, labels: np.ndarray, **changes: Any) -> dict[str, Any]:
    """A finished run that predicted these classes of two, its score and its kept predictions."""
    made = point(**{"score": float((predictions == labels).mean()), **changes})
    folder = run_folder(root, name, result=made, status=failed(status="done", error=None))
    outputs = np.eye(2, dtype=np.float32)[predictions]
    np.savez(folder / "predictions-validation.npz", outputs=outputs, labels=labels)
    return made | {"folder": str(folder)}
