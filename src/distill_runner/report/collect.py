"""Read results from run folders: finished, failed, interrupted, or still running."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError, nearest
from distill_runner.pipeline import status

Result = Mapping[str, Any]
"""Content of ``result.json``, or of ``status.json`` for a run that has not finished."""

NAMES = ("task", "method", "seed", "status")
"""Keys that the file of every run has, whatever its status."""

PICTURES = "pictures"
"""Folder of the pictures of examples, in a run's folder."""

log = logging.getLogger(__name__)


def results(roots: Iterable[Path]) -> list[Result]:
    """Return the results of all runs in ``roots``, sorted by folder name within each root.

    Args:
        roots: run folders, or folders of run folders (``outputs/runs``). A run that is found twice counts once.
    Returns:
        One result per run. A folder without a complete result is skipped, with a warning if it has files of a run.
    """
    found: dict[Path, Result] = {}
    for folder in (folder for root in roots for folder in _run_folders(root)):
        if folder not in found and (result := read(folder)):
            found[folder] = result
    return list(found.values())


def chosen(folders: Sequence[Path], wanted: Mapping[str, Sequence[str] | None]) -> list[Result]:
    """Return the results in the folders that a user named, filtered by ``wanted``.

    Args:
        wanted: accepted values by key, such as ``task``; None or an empty list accepts every value.
    Raises:
        UserError: a folder does not exist, no folder holds a run, or no run has one of the values.
    """
    remedy = "Name folders of runs, or a folder that contains them."
    for folder in folders:
        if not folder.is_dir():
            raise UserError("folder", folder, "there is no such folder", remedy)
    found = results(folders)
    if not found:
        raise UserError("folder", " ".join(map(str, folders)), "holds no runs", remedy)
    for key, names in wanted.items():
        known = {str(result[key]) for result in found}
        for name in names or []:
            if name not in known:
                raise UserError(f"--{key}", name, "no run has this value", nearest(name, known))
        found = [result for result in found if not names or result[key] in names]
    return found


def read(folder: Path) -> Result | None:
    """Return the result of one run folder; None if the folder holds no complete result."""
    content = status.read(folder)
    if content is not None and _is_result(content):
        return {**content, "folder": str(folder)}
    if _has_files(folder):
        log.warning("%s is left out: it holds no complete result of a run", folder)
    return None


def pictures_of(folder: Path) -> list[Path]:
    """Return the pictures of examples in a run's folder; kinds of tasks whose examples are texts save none."""
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


def _is_result(content: Result) -> bool:
    if not all(name in content for name in NAMES):
        return False
    if "score" not in content:  # the run has not finished, or its last stage is not the student
        return True
    return isinstance(content["score"], int | float) and isinstance(content.get("student"), dict)
