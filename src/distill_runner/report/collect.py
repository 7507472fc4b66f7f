"""Results from the folders of runs: finished, failed, interrupted, or still at work."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distill_runner import status

Result = Mapping[str, Any]
"""The content of ``result.json``, or of ``status.json`` for a run that has not finished."""

NAMES = ("task", "method", "seed", "status")
"""What every run knows of itself, whatever becomes of it."""

log = logging.getLogger(__name__)


def results(roots: Iterable[Path]) -> list[Result]:
    """The results of all runs in the folders ``roots``, in the order of their names.

    Args:
        roots: run folders, or folders of them (``outputs/runs``). A run that two of them name counts once.
    Returns:
        One result a run. A folder without a whole one is left out, and told in a log line if it has files of a run.
    """
    found: dict[Path, Result] = {}
    for folder in (folder for root in roots for folder in _run_folders(root)):
        if folder not in found and (result := read(folder)):
            found[folder] = result
    return list(found.values())


def read(folder: Path) -> Result | None:
    """The result of one run's folder; None if it holds none, or nothing whole."""
    content = status.read(folder)
    if content is not None and _is_result(content):
        return {**content, "folder": str(folder)}
    if _has_files(folder):
        log.warning("%s is left out: it holds no whole result of a run", folder)
    return None


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
    if "score" not in content:  # not finished, or ended with another stage than the student
        return True
    return isinstance(content["score"], int | float) and isinstance(content.get("student"), dict)
