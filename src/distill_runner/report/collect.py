"""Results from the folders of runs: finished, failed, interrupted, or still at work."""

import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
"""The content of ``result.json``, or of ``status.json`` for a run that has not finished."""

RESULT, STATUS = "result.json", "status.json"
NAMES = ("task", "method", "seed", "status")
"""What every run knows of itself, whatever becomes of it."""

log = logging.getLogger(__name__)


def results(roots: Iterable[Path]) -> list[Result]:
    """The results of all runs in the folders ``roots``, in the order of their names.

    Args:
        roots: run folders, or folders of them (``outputs/runs``). A run that two of them name counts once.
    Returns:
        One result a run. What cannot be read as one is left out, and told in a log line.
    """
    found: dict[Path, Result] = {}
    for folder in (folder for root in roots for folder in _run_folders(root)):
        if folder not in found and (result := read(folder)):
            found[folder] = result
    return list(found.values())


def read(folder: Path) -> Result | None:
    """The result of one run's folder; None if it holds none, or nothing whole."""
    for name in (RESULT, STATUS):
        try:
            content = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("%s is left out: %s", folder / name, error)
            continue
        if _is_result(content):
            return {**content, "status": _status(content), "folder": str(folder)}
        log.warning("%s is left out: it is no result of a run", folder / name)
    return None


def _run_folders(root: Path) -> Iterator[Path]:
    root = root.absolute()
    if any((root / name).is_file() for name in (RESULT, STATUS)):
        yield root
        return
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    yield from (root / name for name in names)


def _is_result(content: Any) -> bool:
    if not isinstance(content, dict) or not all(name in content for name in NAMES):
        return False
    is_number = isinstance(content.get("score"), int | float)
    return content["status"] != "done" or (is_number and isinstance(content.get("student"), dict))


def _status(content: Result) -> str:
    """``running`` becomes ``killed`` if the process was on this host and is gone."""
    status, pid = str(content["status"]), content.get("pid")
    if status != "running" or content.get("host") != socket.gethostname() or not isinstance(pid, int):
        return status
    return status if _is_alive(pid) else "killed"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
