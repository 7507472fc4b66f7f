"""A process ends soon after the one that asked for it, however that one has ended: nobody waits for its work."""

import multiprocessing
import os
import signal
import threading
import time

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 20.0
"""From SIGTERM, which lets training stop and save, to the end."""


def end_with_parent(grace: float | None = None) -> None:
    """From now on.

    Args:
        grace: seconds after which it is asked to save and to end (SIGTERM); None ends it at once.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        try:
            assert parent is not None
            parent.join()
        except (AssertionError, ValueError):  # a launcher's own kind of process, whose parent cannot be waited for
            while os.getppid() == number:
                time.sleep(SECONDS_BETWEEN_LOOKS)
        if grace is not None:
            time.sleep(grace)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_TO_END)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
