"""Protection against code that ends the process from within, before the run can record that it failed."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def exits_raised() -> Iterator[None]:
    """Make ``os._exit`` raise ``SystemExit``, as ``sys.exit`` does, so that the run is recorded as failed.

    In child processes and in threads other than the main thread, ``os._exit`` still ends the process.
    """
    end, process = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        end(status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = end
