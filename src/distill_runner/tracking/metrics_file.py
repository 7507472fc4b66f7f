"""The tracker that writes ``metrics.jsonl``; every run has one."""

import json
from math import isfinite
from pathlib import Path

from distill_runner.tracking.tracker import Tracker, Values, point


class MetricsFile(Tracker):
    """Tracker that appends to ``metrics.jsonl``, one JSON object per line; non-finite numbers become null.

    The file is unbuffered, so every line is written at once. Incomplete lines are removed: after a failed write on a
    full disk, and on opening the file after a process was killed. Summary, tables, texts, pictures and the model are
    left out: they have files of their own in the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.file = path.open("ab", buffering=0)
        whole = path.read_bytes().rpartition(b"\n")[0]
        self.file.truncate(len(whole) + 1 if whole else 0)

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        line = point(values, step, epoch)
        line |= {key: None for key, value in line.items() if isinstance(value, float) and not isfinite(value)}
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        written = self.file.write(data)
        if written != len(data):
            self.file.truncate(self.file.tell() - (written or 0))
            raise OSError(f"{self.file.name}: the disk is full")

    def finish(self, exit_code: int) -> None:
        self.file.close()
