"""``metrics.jsonl``, which every run writes."""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from distill_runner.tracking.tracker import Values, point


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, appended; non-finite numbers become null.

    Every line reaches the file at once, and half a line never stays, be it cut short by a full disk or left
    behind by a killed process.
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
        """Nothing: ``result.json`` holds it."""

    def table(self, name: str, rows: Sequence[Values]) -> None:
        """Nothing: tables are made from the results."""

    def text(self, name: str, text: str) -> None:
        """Nothing, as for tables."""

    def picture(self, name: str, file: Path) -> None:
        """Nothing, as for tables."""

    def model(self, folder: Path) -> None:
        """Nothing: it lies beside the file."""

    def finish(self, exit_code: int) -> None:
        self.file.close()
