"""``status.json``: the state of a run, including runs that were killed.

The folder of a run in progress is locked, so a reader can tell it from a run whose process is gone. This works on any
machine that shares the folder, even if another process now has the same process id.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distill_runner.common.files import atomic_replacement, is_locked, locked, without_secrets

STATUS, RESULT = "status.json", "result.json"
_LOCK = ".lock"


@contextmanager
def locked_run(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Hold the lock of the run in ``folder``, and yield what ``read_run`` returns for it.

    If another process holds the lock, wait for that process first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK, f"waiting for another process, which is working in {folder}"):
        yield read_run(folder)


def write_status(folder: Path, status: str, names: Mapping[str, Any], error: str | None = None) -> None:
    """Replace ``status.json``.

    Args:
        status: ``queued``, ``running``, ``done``, ``failed`` (with its ``error``), ``interrupted`` or ``paused``.
        names: what the run is called: its key, task, method and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATUS, {**names, "status": status, "error": error, "folder": str(folder)})


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return ``result.json`` of a finished run, else ``status.json``; None if ``status.json`` is missing or incomplete.

    A run that is recorded as ``running`` while no process holds its lock is returned as ``killed``.
    """
    contents: dict[str, Any] = {}
    for name in (STATUS, RESULT):
        with suppress(OSError, ValueError):
            contents[name] = json.loads((folder / name).read_text(encoding="utf-8"))
    status, result = (one if isinstance(one := contents.get(name), dict) else None for name in (STATUS, RESULT))
    if status is not None and status.get("status") == "done" and result:
        return {**result, "folder": str(folder)}
    if status is not None and status.get("status") == "running" and not is_locked(folder / _LOCK):
        return {**status, "status": "killed", "error": "its process is gone: out of memory, or killed from outside"}
    return status


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replace ``file`` atomically; secrets of the environment are masked."""
    with atomic_replacement(file) as partial:
        partial.write_text(without_secrets(json.dumps(content, indent=1, default=str)), encoding="utf-8")
