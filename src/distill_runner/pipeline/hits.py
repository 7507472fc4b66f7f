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
Stat = tuple[int, int, int]
"""Size in bytes, and times of the last changes of content and of the inode in nanoseconds."""


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
        self._paths: dict[str, Stat | None] | None = None
        self._code = ""
        self._lines: list[Line] = []

    def replay(self) -> Mapping[str, Any] | None:
        """Log and print what the recorded hit did, and return its result; None if it does not hold any more."""
        try:
            record = json.loads(self.file.read_text(encoding="utf-8"))
            if record["digest"] != self.digest or record["code"] != _code_digest():
                return None
            if any(_stat(path) != (stat and tuple(stat)) for path, stat in record["files"].items()):
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
            self._paths, self._code = {}, _code_digest()
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
        paths = {path for path in map(Path, self._paths) if not _is_within(path, ignored)}
        paths -= {path for path in paths if path.is_relative_to(store) and path.is_dir()}
        paths -= {*self.folder.parents[:2]}  # those of all runs
        own = [str(file) for file in self.folder.rglob("*") if file.is_file() and not {*VOLATILE} & {*file.parts}]
        files = {str(path): self._paths[str(path)] for path in paths}
        files |= {name: _stat(name) for name in (*own, *_installed())}  # a hit writes its own files anew
        content = {"digest": self.digest, "code": self._code, "files": files, "lines": self._lines, "text": text}
        with suppress(OSError):  # the next repetition then takes the usual way
            write_json(self.file, content)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, record.getMessage()))

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        paths = self._paths  # another thread may end the record meanwhile
        if paths is None or event not in ("open", "os.scandir", "os.listdir"):
            return
        if not isinstance(arguments[0], str | os.PathLike) or (event == "open" and _is_writing(*arguments[1:3])):
            return
        with suppress(OSError, ValueError):  # of paths that cannot be read either
            _add(paths, _source(Path(os.fsdecode(arguments[0])).absolute()), event == "open")


def _add(paths: dict[str, Stat | None], path: Path, is_file: bool) -> None:
    """Note the state of a path before it is read: a change after that must count."""
    if str(path) in paths:
        return
    stat = paths[str(path)] = _stat(str(path))
    if is_file and stat:
        _add(paths, path.parent, False)  # a new file changes the time of its folder


def _is_writing(mode: str | None, flags: int | None) -> bool:
    """Whether a file is opened to write, by its mode or, without one (``os.open``), by its flags."""
    return bool({*mode} & {*"wax+"}) if mode else bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _source(path: Path) -> Path:
    """Return the source of compiled code in its cache, which Python may write anew; other paths as they are."""
    return Path(source_from_cache(path)) if path.suffix == ".pyc" and path.parent.name == "__pycache__" else path


def _stat(path: str) -> Stat | None:
    """Return size and times of a file, the time alone of a folder; None if it does not exist.

    A hard link to a file in the store changes the time of the inode, not the content.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    if os.path.isdir(path):
        return 0, status.st_mtime_ns, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns if status.st_nlink == 1 else 0


def _installed() -> Iterator[str]:
    """Yield the folders of installed packages; installing or removing a package changes their time."""
    return (path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path))


def _is_within(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in (*folders, Path(os.__file__).parent))


def _code_digest() -> str:
    """Return a hash of names, sizes and times of the files of this program; caches of Python do not count."""
    files = sorted(str(file) for file in PACKAGE.rglob("*") if file.suffix != ".pyc" and file.is_file())
    entries = [(file, _stat(file)) for file in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
