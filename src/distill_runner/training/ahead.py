"""The next update is made ready while the device computes this one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def ahead(items: Iterator[Item], start: Callable[[], None] = lambda: None) -> Iterator[Item]:
    """The same items in the same order, each made in a thread while the one before it is used.

    Whatever making one raises is raised when its turn comes. The thread ends with the iterator.

    Args:
        start: called once in the thread, before the first.
    """
    with ThreadPoolExecutor(1, "ahead", start) as thread:
        coming = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]
