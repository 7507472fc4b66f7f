"""Results of runs, read from run folders: finished, failed, interrupted, or still running."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from distill_runner.common.errors import UserError, require_choice
from distill_runner.pipeline import status

Key = TypeVar("Key")
Value = TypeVar("Value")
Result = Mapping[str, Any]
"""Content of ``result.json``, or of ``status.json`` for a run that has not finished."""
TYPES: dict[Any, tuple[str, ...]] = {
    str: ("mapping", "attention", "teacher", "key", "metric", "stage", "command", "base_model"),
    int: ("heads", "best_epoch", "epochs", "steps", "num_params"),
    float: ("score", "teacher_score", "seconds", "examples_per_second"),
    dict[str, Any]: ("student", "settings", "data", "test", "published", "teacher_model"),
    dict[str, float]: ("metrics",),
    dict[str, str | float | bool | None]: ("conditions",),
    dict[str, dict[str, Any]]: ("specs",),
    list[Any]: ("history", "assumptions", "labels"),
    list[dict[str, Any]]: ("account",),
}
"""Types of what tables and comparisons read of a result, where it is not None."""
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("task", "method", "status"), (str, ...)),
    "seed": (int, ...),
    **{name: (type_ | None, None) for type_, names in TYPES.items() for name in names},
}
CHECKED: type[BaseModel] = create_model("CHECKED", __config__=ConfigDict(strict=True), **_FIELDS)
VALIDATION_PREDICTIONS, TEST_PREDICTIONS = "predictions-*.npz", "test-predictions-*.npz"
"""Prediction files in a run's folder, one per validation or test split: ``outputs`` (N, C) and ``labels`` (N,).

Where examples depend on each other, they have ``clusters`` (N,) and, if the score is a mean over examples,
``score-<metric>`` (N,). If it is the F1 of sums over examples, they have ``counts-<metric>`` (N, 3) instead: true
positives, predicted and actual positives of each; or (N, 3 T), whose F1 is the mean over T classes.
"""
PICTURES = "pictures"
"""Folder of the pictures of examples, in a run's folder."""

NAME_RUNS = "Name folders of runs, or a folder that contains them."

log = logging.getLogger(__name__)


def read_results(roots: Iterable[Path]) -> list[Result]:
    """Return the results of all runs in ``roots``, sorted by folder name within each root.

    Args:
        roots: run folders, or folders of run folders (``outputs/runs``). A run that is found twice counts once.
    Returns:
        One result per run. A folder without a complete result is skipped, with a warning if it has files of a run.
    Raises:
        UserError: a root does not exist.
    """
    folders = dict[Path, None]()
    for root in roots:
        if not root.is_dir():
            raise UserError("folder", root, "there is no such folder", NAME_RUNS)
        root = root.absolute()
        runs = [root] if _has_files(root) else sorted(folder for folder in root.iterdir() if folder.is_dir())
        folders |= dict.fromkeys(runs)
    return [result for folder in folders if (result := read_result(folder))]


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in the order of the pairs."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def select_results(folders: Sequence[Path], filters: Mapping[str, Sequence[str] | None]) -> list[Result]:
    """Return the results in the folders that a user names, filtered by ``filters``.

    Args:
        filters: accepted values by key, such as ``task``; None or an empty list accepts every value.
    Raises:
        UserError: a folder does not exist, no folder holds a run, or no run has one of the values.
    """
    results = read_results(folders)
    if not results:
        raise UserError("folder", " ".join(map(str, folders)), "holds no runs", NAME_RUNS)
    for key, values in filters.items():
        for value in values or []:
            require_choice(f"--{key}", value, {str(result[key]) for result in results}, "no run has this value")
        results = [result for result in results if not values or result[key] in values]
    return results


def read_result(folder: Path) -> Result | None:
    """Return the result of one run folder; None if the folder holds no complete result."""
    if not _has_files(folder):
        return None
    content = status.read_run(folder)
    if content is not None and (problem := _problem(content, folder)) is None:
        return {**content, "folder": str(folder)}
    log.warning("%s is left out: %s", folder, problem if content else "it holds no complete result of a run")
    return None


def upstream_keys(spec: Mapping[str, Any]) -> list[str]:
    """Return the keys of the stages that a stage needs: source of the model, teacher, and members of an ensemble."""
    keys = (spec.get("model", {}).get("upstream"), spec.get("teacher"), *spec.get("members", ()))
    return [key for key in keys if key]


def pictures_of(folder: Path) -> list[Path]:
    """Return the pictures of examples in a run's folder; tasks whose examples are texts save none."""
    return sorted((folder / PICTURES).glob("*.png"))


def _has_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (status.STATUS, status.RESULT))


def _problem(content: Result, folder: Path) -> str | None:
    """Return why the content of the files of the run in ``folder`` is no result; None if it is one."""
    if content.get("status") == "done" and "score" not in content and (folder / status.RESULT).is_file():
        return f"{status.RESULT} cannot be read, or has no score"  # of a run that ends with another stage there is none
    try:
        CHECKED.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        return f"it holds no complete result of a run: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    parts = [content.get(name) for name in ("score", "student", "specs")]
    if "score" in content and (None in parts or isnan(content["score"])):
        return "its result has no score, no student or no specs"
    return None  # without a score, the run has not finished, or its last stage is not the student


def without_specs(result: Result) -> dict[str, Any]:
    """Return a result as trackers get it: its names, settings and scores, without the specs of its stages."""
    return {key: value for key, value in result.items() if key not in ("specs", "conditions")}


# --- What a result says


def label(result: Result) -> str:
    """Return the method with its mapping and, unless it is the plain dot product, its attention: ``alp po kqv-4``."""
    attention, heads = result.get("attention"), result.get("heads")
    if attention == "dot":
        attention = None
    elif attention and heads:
        attention = f"{attention}-{heads}"
    return " ".join(part for part in (result["method"], result.get("mapping"), attention) if part)


def is_scored(result: Result) -> bool:
    """Whether the result is of a student that was trained to the end; a run may also end with another stage."""
    return result["status"] == "done" and "score" in result


def selection_of(result: Result) -> Mapping[str, Any]:
    """Return the data or metric (``on``) and the ``score`` that selected the epoch; empty if the reported score did."""
    return result.get("selection") or {}


def settings(result: Result) -> Mapping[str, Any]:
    """Return the hyper-parameters of a run by dotted name; empty if they could not be read."""
    return result.get("settings") or {}


def data_of(result: Result) -> Mapping[str, Any]:
    """Return the data that trained, selected and scored a student (``TaskSplits.data_summary``); empty if not known."""
    return result.get("data") or {}


def tested_on(result: Result) -> Mapping[str, Mapping[str, Any]]:
    """Return the test splits, by name, whose mean is the score of a test column; empty for other columns."""
    return result.get("tested_on") or {}


def scored_on(result: Result) -> list[str]:
    """Return the validation or test splits whose mean is the score: several, such as languages, or one.

    Empty if not known.
    """
    if tested := tested_on(result):
        return [*tested]
    return [result["split"]] if "split" in result else data_of(result).get("scored_on", [])


def constant_prediction(result: Result) -> str | None:
    """Return the warning of a run whose student predicts the same for all examples of a split; None without one."""
    entries = (entry for entry in result.get("account") or () if entry.get("topic") == "scores")
    warnings = (str(warning) for entry in entries for warning in entry.get("warnings") or ())
    return next((warning for warning in warnings if "the student predicts" in warning), None)


def undefined_reason(result: Result) -> str | None:
    """Return why the metric that is the score is undefined on a validation split, where it counts as 0; else None."""
    splits = (entry.get("undefined") or {} for entry in result.get("account") or ())
    reasons = (by_metric.get(result.get("metric")) for of_entry in splits for by_metric in of_entry.values())
    return next(filter(None, reasons), None)
