"""The tracker that writes ``metrics.jsonl``; every run has one."""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from distill_runner.tracking.tracker import Values, point


class MetricsFile:
    """Tracker that appends to ``metrics.jsonl``, one JSON object per line; non-finite numbers become null.

    The file is unbuffered, so every line is written at once. Incomplete lines are removed: after a failed write on a
    full disk, and on opening the file after a process was killed.
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

    def summary(self, values: Values) -> None:
        """Do nothing: ``result.json`` holds the summary."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Do nothing: tables are made from the result files."""

    def text(self, name: str, text: str) -> None:
        """Do nothing, as for tables."""

    def picture(self, name: str, file: Path) -> None:
        """Do nothing, as for tables."""

    def model(self, folder: Path) -> None:
        """Do nothing: the model is in the same folder as the file."""

    def finish(self, exit_code: int) -> None:
        self.file.close()
