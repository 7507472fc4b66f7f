"""Forked processes, also as another user, and waiting for what they do."""

import os
import time
from collections.abc import Callable
from typing import Any

GROUP = 5000
"""Group that users of a shared folder have in common."""


def start(function: Callable[[], Any], uid: int | None = None, umask: int = 0o022) -> int:
    """A forked process, as another user of the group if ``uid`` is not None; the id of the process."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            if uid is not None:
                os.setgroups([GROUP])
                os.setgid(uid)  # a group of the user's own, as on most systems
                os.setuid(uid)
            os.umask(umask)
            function()
            code = 0
        except BaseException as error:
            print(f"user {uid}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    return process


def exit_code(process: int) -> int:
    """The exit code of a process, negative for a signal, when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def finish(process: int) -> None:
    """Wait for a process that must succeed."""
    assert exit_code(process) == 0


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
