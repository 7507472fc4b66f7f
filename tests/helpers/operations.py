"""Counts operations of torch, each of which is a kernel on a GPU, where starting kernels takes most of an update."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = frozenset({"detach", "empty", "empty_like", "new_empty", "_unsafe_view", "_local_scalar_dense"})
"""Operations that compute nothing; views are left out by themselves."""


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and name not in FREE:
            self.seen[name] += 1
        return function(*args, **kwargs or {})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The operations within the context, those of backward passes too, by name."""
    with _Counting() as mode:
        yield mode.seen
