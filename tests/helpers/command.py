"""The console script as tests run it."""

import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from distill_runner.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def distill_run(folder: Path, *arguments: str) -> Ended:
    """The script within this process, in ``folder``: the imports of a new one would take seconds.

    What the points of a sweep print themselves, which are processes of their own, is not in it, but in their logs.
    """
    out, err, handlers, code = io.StringIO(), io.StringIO(), logging.root.handlers[:], 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.delenv("DISTILL_DATA_DIR", raising=False)
        patch.setattr("distill_runner.sweeping.plan.SECONDS", 0.01)  # of measuring, for a plan
        patch.setattr(sys, "argv", ["distill-run", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            logging.root.handlers[:] = handlers
    return Ended(code, out.getvalue(), err.getvalue())
