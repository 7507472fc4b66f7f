"""Arguments and errors of the other console scripts: a user error ends in one or two lines and exit code 2."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from distill_runner.common.errors import UserError


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ``UserError`` instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, None, message, f"See {self.prog} --help.")


def ended(script: Callable[[], None]) -> None:
    """Run a console script, and print errors.

    Raises:
        SystemExit: with code 2 after a ``UserError``, 130 after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        script()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def require_folder(out: Path) -> None:
    """Check before any work that the folder of the file ``out`` exists."""
    if not out.absolute().parent.is_dir():
        raise UserError("--out", out, "its folder does not exist")


def write(out: Path, content: str | bytes) -> None:
    """Write a file that the user named.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        out.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError("--out", out, f"cannot be written: {error.strerror}") from error
