"""Results as runs leave them, for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np


def with_specs(run: dict[str, Any]) -> dict[str, Any]:
    """The run with the specs of its stages, made from what it says of student, teacher, data and settings.

    Settings that begin with the name of a stage are those of a stage that the student's weights come from.
    """
    key = run.get("key") or json.dumps(run, sort_keys=True, default=str)
    settings, student = dict(run.get("settings") or {}), run.get("student") or {}
    source = str(student.get("source"))
    specs = {f"{key}/teacher": _teacher_spec(run)} if run.get("teacher") else {}
    upstream = None
    for stage in reversed(_chain(source, settings)):
        own = {name.removeprefix(f"{stage}."): settings.pop(name) for name in [*settings] if name.startswith(stage)}
        specs[f"{key}/{stage}"] = _stage_spec(run, stage, own, {"upstream": upstream} if upstream else {})
        upstream = f"{key}/{stage}"
    model: dict[str, Any] = {"upstream": upstream} if upstream else {"content": source}
    if source == "None":
        model = {"architecture": {"model_type": "bert"}}
    model |= {"num_layers": student.get("num_layers"), "width": student.get("width"), "layers": student.get("init")}
    specs[key] = _stage_spec(run, "student", settings, model)
    if run.get("teacher"):
        specs[key]["teacher"] = f"{key}/teacher"
    return run | {"key": key, "specs": specs}


def _chain(source: str, settings: dict[str, Any]) -> list[str]:
    stages = []
    while source.startswith("stage:"):
        stages.append(source.removeprefix("stage:"))
        source = str(settings.pop(f"{stages[-1]}.model.source", None))
    return stages


def _teacher_spec(run: dict[str, Any]) -> dict[str, Any]:
    names = {"kind": "stage", "stage": "teacher", "seed": run.get("teacher_seed", 42)}
    return names | {"model": {"content": run["teacher"]}, "optim": {"lr": 1e-4}}


def _stage_spec(run: dict[str, Any], stage: str, settings: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    data = {"validation": {"validation": "validation"}, **(run.get("data") or {})}
    data = {name: value for name, value in data.items() if name not in ("config", "revision")}
    select_on, splits = data.pop("select_on", None), [*data["validation"]]
    data["scored_on"] = [select_on] if select_on in splits else splits if select_on == "mean" else splits[:1]
    data |= {"select_on": select_on} if select_on == "held_out" else {}
    data |= {"metrics": [run.get("metric", "accuracy")], "content": run.get("dataset")}
    if run.get("transfer"):
        data["transfer"] = run["transfer"]
    spec: dict[str, Any] = {"kind": "stage", "stage": stage, "seed": run["seed"], "data": data, "model": model}
    spec |= {"method": {"ce": {"weight": 1.0}}, "optim": {"epochs": run.get("epochs")}}
    for name, value in settings.items():
        part, _, rest = name.partition(".")
        if part in ("optim", "route"):
            spec.setdefault(part, {})[rest] = value
        elif rest:
            spec["method"].setdefault(part, {})[rest] = value
        else:
            spec[part] = value
    return spec


def result(**changes: Any) -> dict[str, Any]:
    """A finished run of ALP on RTE."""
    return with_specs(_named(changes))


def _named(changes: dict[str, Any]) -> dict[str, Any]:
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
        "assumptions": ["kd is scaled by T²"],
        "folder": "outputs/0a1b2c3d",
        "dataset": "nyu-mll/glue",
        "command": "distill-run task=rte method=alp seed=1",
    } | changes


def failed(**changes: Any) -> dict[str, Any]:
    """A failed run knows only what it was asked to do."""
    keys = ("key", "task", "method", "mapping", "attention", "seed", "folder")
    known = {key: value for key, value in _named({}).items() if key in keys}
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
