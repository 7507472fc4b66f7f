"""Draw a run's progress as terminals of 80 and 120 columns and a pipe show it: `python docs/_ext/widths.py <folder>`.

No model is trained: the display gets the values of an update of ALP-KD, as training reports them.
"""

import io
import logging
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from distill_runner.common import terminal

VALUES = {
    "lr": 1e-5,
    "loss": 1.7342,
    "loss/ce": 0.2031,
    "loss/kd": 1.0124,
    "loss/intermediate": 0.5187,
    "examples_per_second": 87.0,
}
SCORES = {"validation/accuracy": 0.6643, "validation/f1": 0.6512}


def screen(width: int | None) -> str:
    """Return what a terminal of ``width`` columns shows in the middle of the second of two stages; None: a pipe."""
    stream = io.StringIO()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=stream, force=True)
    bars = terminal._bars() if width else None
    if bars:
        bars.live.console = Console(file=stream, width=width, force_terminal=True, legacy_windows=False)
    stages = terminal.Stages({"teacher": 2.0, "student": 1.0})
    stages.rich = bars
    with stages:
        terminal.Bar(stages, "teacher").show({**VALUES, "share_done": 1.0}, 100, 20.0)
        bar = terminal.Bar(stages, "student")
        bar.show(SCORES, 50, 10.0)
        bar.last_line = -1e9  # a pipe gets a line every 15 seconds
        bar.show({**VALUES, "share_done": 0.5}, 50, 10.0)
        if bars:
            bars.refresh()
    text = stream.getvalue()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-GJKhl]", "", text).replace("\r", "\n")
    lines = [line for line in drawn.splitlines() if re.sub(r"\x1b\[[0-9;]*m", "", line).strip()]
    return "\n".join(lines[-2:] if width else lines)


def main(folder: Path) -> None:
    """Write a picture of each."""
    for name, width in (("80", 80), ("120", 120), ("pipe", None)):
        console = Console(record=True, width=width or 120, file=io.StringIO())
        console.print(Text.from_ansi(screen(width)))
        (folder / f"{name}.svg").write_text(console.export_svg(title=name, unique_id=f"w{name}"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
