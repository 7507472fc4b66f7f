"""Results of runs, read from run folders: finished, failed, interrupted, or still running."""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common.errors import UserError, suggestion
from distill_runner.pipeline import status

Result = Mapping[str, Any]
"""Content of ``result.json``, or of ``status.json`` for a run that has not finished."""
REQUIRED = ("task", "method", "seed", "status")
"""Keys that the file of every run has, whatever its status."""
TYPES: dict[type | tuple[type, ...], tuple[str, ...]] = {
    str: ("task", "method", "mapping", "attention", "teacher", "key", "metric", "stage", "command", "base_model"),
    int: ("seed", "heads", "best_epoch", "epochs", "steps", "num_params"),
    (int, float): ("score", "teacher_score", "seconds", "examples_per_second"),
    dict: ("student", "metrics", "settings", "data", "test", "conditions", "specs", "published", "teacher_model"),
    list: ("history", "assumptions", "labels"),
}
"""Types of what tables and comparisons read of a result, where it is not None."""
TEST_PREDICTIONS = "test-predictions-*.npz"
"""Files of a run's folder with the predictions for test splits, in the format of those for validation splits."""
PICTURES = "pictures"
"""Folder of the pictures of examples, in a run's folder."""
STAGE_KINDS = ("stage", "ensemble", "labels")
"""Folders of a store that hold stages."""

log = logging.getLogger(__name__)


def read_results(roots: Iterable[Path]) -> list[Result]:
    """Return the results of all runs in ``roots``, sorted by folder name within each root.

    Args:
        roots: run folders, or folders of run folders (``outputs/runs``). A run that is found twice counts once.
    Returns:
        One result per run. A folder without a complete result is skipped, with a warning if it has files of a run.
    """
    results: dict[Path, Result] = {}
    for folder in (folder for root in roots for folder in _run_folders(root)):
        if folder not in results and (result := read_result(folder)):
            results[folder] = result
    return list(results.values())


def select_results(folders: Sequence[Path], filters: Mapping[str, Sequence[str] | None]) -> list[Result]:
    """Return the results in the folders that a user names, filtered by ``filters``.

    Args:
        filters: accepted values by key, such as ``task``; None or an empty list accepts every value.
    Raises:
        UserError: a folder does not exist, no folder holds a run, or no run has one of the values.
    """
    remedy = "Name folders of runs, or a folder that contains them."
    for folder in folders:
        if not folder.is_dir():
            raise UserError("folder", folder, "there is no such folder", remedy)
    results = read_results(folders)
    if not results:
        raise UserError("folder", " ".join(map(str, folders)), "holds no runs", remedy)
    for key, values in filters.items():
        present = {str(result[key]) for result in results}
        for value in values or []:
            if value not in present:
                raise UserError(f"--{key}", value, "no run has this value", suggestion(value, present))
        results = [result for result in results if not values or result[key] in values]
    return results


def read_result(folder: Path) -> Result | None:
    """Return the result of one run folder; None if the folder holds no complete result."""
    content = status.read_run(folder)
    if content is not None and (problem := _problem(content, folder)) is None:
        specs = content.get("specs") or _stored_specs(folder, content)
        return {**content, "specs": specs, "folder": str(folder)}
    if _has_files(folder):
        problem = "it holds no complete result of a run" if content is None else problem
        log.warning("%s is left out: %s", folder, problem)
    return None


def _stored_specs(folder: Path, result: Result) -> dict[str, Any]:
    """Return the specs of a finished run of an older version, which did not record them, from the store, by key.

    Those that are no longer in the store are left out.
    """
    if not is_scored(result):
        return {}
    stores = [folder.parent.parent / "store"]
    with suppress(OSError, ValueError, TypeError, LookupError, yaml.YAMLError):  # else, the default folder
        stores.insert(0, Path(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["store"]["dir"]))
    specs: dict[str, Any] = {}
    keys = [str(result.get("key"))]
    while keys:
        key = keys.pop()
        files = [store / kind / key / "spec.json" for store in stores for kind in STAGE_KINDS]
        if key not in specs and (file := next(filter(Path.is_file, files), None)):
            specs[key] = json.loads(file.read_text(encoding="utf-8"))
            keys += upstream_keys(specs[key])
    return specs


def upstream_keys(spec: Mapping[str, Any]) -> list[str]:
    """Return the keys of the stages that a stage needs: source of the model, teacher, and members of an ensemble."""
    keys = (spec.get("model", {}).get("upstream"), spec.get("teacher"), *spec.get("members", ()))
    return [key for key in keys if key]


def pictures_of(folder: Path) -> list[Path]:
    """Return the pictures of examples in a run's folder; tasks whose examples are texts save none."""
    return sorted((folder / PICTURES).glob("*.png"))


def _run_folders(root: Path) -> Iterator[Path]:
    root = root.absolute()
    if _has_files(root):
        yield root
        return
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    yield from (root / name for name in names)


def _has_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (status.STATUS, status.RESULT))


def _problem(content: Result, folder: Path) -> str | None:
    """Return why the content of the files of the run in ``folder`` is no result; None if it is one."""
    if content.get("status") == "done" and "score" not in content and (folder / status.RESULT).is_file():
        return f"{status.RESULT} cannot be read, or has no score"  # of a run that ends with another stage there is none
    if missing := [name for name in REQUIRED if content.get(name) is None]:
        return f"it holds no complete result of a run: no {missing[0]}"
    for types, names in TYPES.items():
        for name in names:
            if (value := content.get(name)) is not None and not _is_of(value, types):
                return f"{name} of its result is {str(value)[:40]!r}, a {type(value).__name__}"
    for name, value in (content.get("metrics") or {}).items():
        if not _is_of(value, (int, float)):
            return f"metrics.{name} of its result is {str(value)[:40]!r}, a {type(value).__name__}"
    if any(isinstance(value, list | dict) for value in (content.get("conditions") or {}).values()):
        return "conditions of its result are not plain values"
    if "score" in content and (not isinstance(content.get("student"), dict) or not _is_number(content["score"])):
        return "its result has no score or no student"
    return None  # without a score, the run has not finished, or its last stage is not the student


def _is_number(value: Any) -> bool:
    return value is not None and not math.isnan(value)


def _is_of(value: Any, types: type | tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def without_specs(result: Result) -> dict[str, Any]:
    """Return a result as trackers get it: its names, settings and scores, without the specs of its stages."""
    return {key: value for key, value in result.items() if key not in ("specs", "conditions")}


# --- What a result says


def label(result: Result) -> str:
    """Return the method with its mapping and, unless it is the plain dot product, its attention: ``alp po kqv-4``."""
    attention, heads = result.get("attention"), result.get("heads")
    suffix = None if attention == "dot" else f"{attention}-{heads}" if attention and heads else attention
    return " ".join(part for part in (result["method"], result.get("mapping"), suffix) if part)


def stage_of(source: str | None) -> str | None:
    """Return the name of the stage whose model ``source`` names; None if it names no stage."""
    name = (source or "").removeprefix("stage:")
    return name if name != (source or "") else None


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
    """Return the data that trained, selected and scored a student (``Splits.data_summary``); empty if not known."""
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
    entries = result.get("account")
    for entry in entries if isinstance(entries, list) else ():
        warnings = entry.get("warnings") if isinstance(entry, Mapping) and entry.get("topic") == "scores" else None
        for warning in warnings if isinstance(warnings, list) else ():
            if "the student predicts" in str(warning):
                return str(warning)
    return None


def undefined_reason(result: Result) -> str | None:
    """Return why the metric that is the score is undefined on a validation split, where it counts as 0; else None."""
    entries = result.get("account")
    for entry in entries if isinstance(entries, list) else ():
        splits = entry.get("undefined") if isinstance(entry, Mapping) else None
        for reasons in splits.values() if isinstance(splits, Mapping) else ():
            if isinstance(reasons, Mapping) and (reason := reasons.get(result.get("metric"))):
                return str(reason)
    return None
