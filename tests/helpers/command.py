"""The console script as tests run it."""

import io
import logging
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from distill_runner import cli
from distill_runner.common.errors import message_and_exit_code


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str
    error: str = ""
    remedy: str = ""
    """The remedy of its error, with what it offers to type."""


def distill_run(folder: Path, *arguments: str) -> Ended:
    """The script within this process, in ``folder``: the imports of a new one would take seconds.

    What the points of a sweep print themselves, which are processes of their own, is not in it, but in their logs.
    """
    out, err, handlers, code = io.StringIO(), io.StringIO(), logging.root.handlers[:], 0
    errors = list[BaseException]()

    def message(error: BaseException) -> tuple[str, int]:
        errors.append(error)
        return message_and_exit_code(error)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.delenv("DISTILL_DATA_DIR", raising=False)
        patch.setattr("distill_runner.sweeping.plan.SECONDS", 0.01)  # of measuring, for a plan
        patch.setattr(sys, "argv", ["distill-run", *arguments])
        patch.setattr(cli, "message_and_exit_code", message)
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            logging.root.handlers[:] = handlers
    remedy = next((getattr(error, "remedy", "") for error in errors), "")
    return Ended(code, out.getvalue(), err.getvalue(), "".join(map(str, errors)), remedy)


def check_offers(repeat: Callable[..., Ended], ended: Ended) -> None:
    """Type what an error offers: a result or another refusal, never the same one or an unknown key.

    What only the user knows is in angle brackets.
    """
    offers = getattr(ended.remedy, "offers", ())
    for offer in offers:
        if offer[0] in ("pip", "distill-run") or any("<" in word for word in offer):
            continue
        following = repeat(*offer)
        assert following.code in (0, 1, 2), following.err
        assert following.error != ended.error, f"{offer} changes nothing"
        assert not re.search("no such (key|choice)|ould not (override|append)|cannot be read", following.err), offer
    is_text = re.search(r"(?<![\w.$])(task|teacher|student|method|optim)[\w.]*=\w", ended.remedy)
    assert offers or not is_text, f"not through the seam: {ended.remedy}"
