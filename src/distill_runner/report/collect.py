"""Results from the folders of runs: finished, failed, interrupted, or still at work."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError, nearest
from distill_runner.pipeline import status

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


def chosen(folders: Sequence[Path], wanted: Mapping[str, Sequence[str] | None]) -> list[Result]:
    """The results in folders that a user named.

    Args:
        wanted: the names that may stand under a key, such as ``task``; all where there are none.
    Raises:
        UserError: no such folder, no runs in any, or names that none of them has.
    """
    remedy = "Name run folders, or a folder of them."
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
                raise UserError(f"--{key}", name, "no run has it", nearest(name, known))
        found = [result for result in found if not names or result[key] in names]
    return found


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
