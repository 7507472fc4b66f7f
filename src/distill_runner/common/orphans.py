"""Child processes that end soon after their parent has ended, since nobody waits for their work any more."""

import multiprocessing
import os
import signal
import threading
import time

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 20.0
"""Seconds from SIGTERM, which lets training stop and save, to the end of the process."""


def end_with_parent(grace: float | None = None) -> None:
    """Start a thread that ends this process soon after the parent process has ended, however the parent ended.

    Args:
        grace: seconds from the parent's end to SIGTERM, which asks this process to save and to end. None ends this
            process at once.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        try:
            parent.join()  # type: ignore[union-attr]
        except (AttributeError, ValueError):  # a launcher's own kind of process, whose parent cannot be joined
            while os.getppid() == number:
                time.sleep(SECONDS_BETWEEN_LOOKS)
        if grace is not None:
            time.sleep(grace)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_TO_END)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
