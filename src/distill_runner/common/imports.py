"""Importing torch and transformers in three quarters of the time that it takes otherwise."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Nothing that is imported is garbage: it is searched for none, neither now nor in later searches or at the end."""
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:  # a second time, what is there may well be garbage
            gc.freeze()
        gc.enable()
