"""A process that is ended from within cannot tell what became of it, unless it is kept from ending."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def exits_raised() -> Iterator[None]:
    """Within, ``os._exit`` raises ``SystemExit`` as ``sys.exit`` does, so that the run is told to have failed.

    Further processes and threads of this one end as ever.
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
