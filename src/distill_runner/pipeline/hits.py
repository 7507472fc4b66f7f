"""The record of a hit: what the repetition of a finished run read and printed, so that the next one is fast.

A hit compares the key of a run with the store, and the key needs torch, transformers and the content of all inputs:
seconds of imports, to print what was printed before. A repetition therefore notes each file that it opens and each
folder that it lists. As long as nothing of that has changed, the next repetition prints the same lines without them.
Anything else, such as an edited file, another variable or an installed package, takes the usual way.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from distill_runner.common.process import audit_events
from distill_runner.pipeline.holds import FOLDER as HOLDS
from distill_runner.pipeline.status import RESULT, read_run, write_json

HIT = "hit.json"
PREFIXES = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DISTILL_", "CUDA_", "WANDB_", "PYTHON")
"""Environment variables that a run or its libraries read begin with these."""
VOLATILE = (HIT, ".lock", "distill-run.log", "metrics.jsonl", ".hydra", "hydra.yaml", "overrides.yaml")
"""Files of a run's folder that a hit does not report."""
PACKAGE = Path(__file__).parents[1]

Line = tuple[str, int, str]
"""Logger, level and text of a line."""
Stat = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""


class HitRecord(logging.Handler):
    """Record of the hit of one run.

    Args:
        folder: the run's folder.
        settings: the run's resolved configuration.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(logging.INFO)
        self.folder, self.file = folder, folder / HIT
        variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
        conditions = [settings, variables, str(Path.cwd()), sys.version, sys.path[1:], sys.argv[1:]]
        text = json.dumps(conditions, sort_keys=True, default=str)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._paths: set[str] | None = None
        self._lines: list[Line] = []

    def replay(self) -> Mapping[str, Any] | None:
        """Log and print what the recorded hit did, and return its result; None if it does not hold any more."""
        try:
            record = json.loads(self.file.read_text(encoding="utf-8"))
            if record["digest"] != self.digest or record["code"] != _code_digest():
                return None
            if any(_stat(path) != tuple(stat) for path, stat in record["files"].items()):
                return None
            lines, text = [(str(name), int(level), str(line)) for name, level, line in record["lines"]], record["text"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or damaged
            return None
        for name, level, line in lines:
            logging.getLogger(name).log(level, "%s", line)
        print(text)
        return read_run(self.folder)

    def start(self) -> None:
        """Note from now on what is opened, listed and logged, if the run has a result.

        A process that has run before does not open again what it keeps in memory, so it notes nothing.
        """
        if (self.folder / RESULT).is_file() and "torch" not in sys.modules:
            self._paths = set()
            audit_events(self._note)
            logging.getLogger("distill_runner").addHandler(self)

    def stop(self) -> None:
        """End what ``start`` began."""
        self._paths = None
        logging.getLogger("distill_runner").removeHandler(self)

    def save(self, text: str, store: Path) -> None:
        """Write the record of a hit that has just printed ``text``.

        Args:
            store: folder of the store, whose folders change whenever any run adds an artifact.
        """
        if self._paths is None:
            return
        store = store.absolute()
        ignored = (*map(Path, _installed()), PACKAGE, self.folder, store / HOLDS, *map(Path, ("/dev", "/proc", "/sys")))
        opened = [Path(path).absolute() for path in self._paths]
        opened += [Path(source_from_cache(path)) for path in opened if path.suffix == ".pyc"]
        paths = {path for path in opened if not _is_within(path, ignored)}
        paths |= {path.parent for path in paths if path.is_file()}  # a new file changes the time of its folder
        paths -= {path for path in paths if path.is_relative_to(store) and path.is_dir()}
        paths -= {*self.folder.parents[:2]}  # those of all runs
        paths |= {file for file in self.folder.rglob("*") if file.is_file() and not {*VOLATILE} & {*file.parts}}
        files = {str(path): stat for path in [*paths, *map(Path, _installed())] if (stat := _stat(str(path)))}
        content = {"digest": self.digest, "code": _code_digest(), "files": files, "lines": self._lines, "text": text}
        with suppress(OSError):  # the next repetition then takes the usual way
            write_json(self.file, content)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, record.getMessage()))

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._paths is None or event not in ("open", "os.scandir", "os.listdir"):
            return
        path, mode = arguments[0], arguments[1] if event == "open" else "r"
        if isinstance(path, str | os.PathLike) and not {*str(mode or "r")} & {*"wax+"}:
            self._paths.add(os.fsdecode(path))


def _stat(path: str) -> Stat | None:
    """Return size and time of a file, the time alone of a folder; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (0 if os.path.isdir(path) else status.st_size), status.st_mtime_ns


def _installed() -> Iterator[str]:
    """Yield the folders of installed packages; installing or removing a package changes their time."""
    return (path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path))


def _is_within(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in (*folders, Path(os.__file__).parent))


def _code_digest() -> str:
    """Return a hash of names, sizes and times of the files of this program."""
    entries = sorted((str(file), _stat(str(file))) for file in PACKAGE.rglob("*") if file.suffix != ".pyc")
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
