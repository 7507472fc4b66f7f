"""Prepare the next update in a thread while the device computes the current update."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def ahead(items: Iterator[Item], start: Callable[[], None] = lambda: None) -> Iterator[Item]:
    """Yield ``items`` in order; a thread makes each item while the caller uses the previous item.

    An exception from making an item is raised when the caller asks for that item. The thread ends with the iterator.

    Args:
        start: function called once in the thread, before the first item is made.
    """
    with ThreadPoolExecutor(1, "ahead", start) as thread:
        coming = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]
