"""Draw README's picture of a terminal: `make readme-picture` runs the commands below and keeps their output."""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    "distill-run experiment=demo seed=1",
    "distill-run table --compare kd nkd",
)
WIDTH, MOST_LINES = 100, 14


def main() -> None:
    """Run the commands in an empty folder, and cut the middle of long outputs."""
    target = Path(__file__).parents[1] / "terminal.svg"
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            print(command, flush=True)
            console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
            completed = subprocess.run(
                command.split(),
                cwd=folder,
                env=environment,
                text=True,
                encoding="utf-8",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            lines = completed.stdout.replace(str(Path(folder).resolve()), "~").rstrip().splitlines()
            if len(lines) > MOST_LINES:
                lines = [*lines[: MOST_LINES // 3], "...", *lines[-(MOST_LINES - MOST_LINES // 3) :]]
            console.print(Text("\n".join(line[:WIDTH] for line in lines)))
            console.print()
            if completed.returncode:
                sys.exit(f"{command} ended with exit code {completed.returncode}:\n{completed.stdout[-2000:]}")
    svg = console.export_svg(title="distill-run", unique_id="terminal")
    target.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8"
    )  # they would be fetched
    print(target)


if __name__ == "__main__":
    main()
