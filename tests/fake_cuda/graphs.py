"""``torch.cuda.CUDAGraph`` on the fake device: a replay computes again what was called while it recorded.

Nothing happens while it records: weights and the state of the generator stay. As on a GPU, what makes the host
wait, copies of memory that is not pinned, allocations of pinned memory, calls of the generator, and branches for which
nothing waits are errors. After
an error the stream of the recording is still the current one, the generator is not to be used until another recording
has ended well, and no other begins until the failed one's use of its pool is ended (torch until 2.12). Graphs of one
pool share their memory: what one computes lasts until another one is replayed. What a graph reads must not be freed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fake_cuda import COUNTS

RANDOM = frozenset(["native_dropout", "bernoulli_", "bernoulli", "rand", "randn", "uniform_", "normal_"])


class Stream:
    """A stream. One that waits for that of a recording is a branch of it, until it is waited for in turn."""

    device, device_index = torch.device("cuda:0"), 0

    def wait_stream(self, other: "Stream") -> None:
        if (recording := CUDAGraph.current) is not None:
            if other in recording.branches:
                recording.branches.remove(other)
            elif other is STREAMS[1]:
                recording.branches.append(self)


STREAMS = [Stream(), Stream()]
"""The first one, and that of recordings."""
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


class CUDAGraph:
    """The calls of one recording, on the tensors that it saw, and the number of their kernels."""

    current: "CUDAGraph | None" = None
    has_failed = False
    stream = STREAMS[0]
    pools_in_use: ClassVar[list[list["CUDAGraph"]]] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}
        self.computed: list[Tensor] = []
        self.made = set[int]()
        self.read: dict[int, StorageWeakRef] = {}
        self.neighbors = [self]
        self.error = ""
        self.branches: list[Stream] = []
        self.kernels = 0

    def spoil(self) -> None:
        """Lose what lies in the memory of the pool."""
        for tensor in self.computed:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        assert CUDAGraph.current is None, NOT_PERMITTED
        assert not any(storage.expired() for storage in self.read.values()), "an illegal memory access"
        for other in self.neighbors:
            if other is not self:
                other.spoil()
        COUNTS.launches["replay"] += 1
        launches, copies = COUNTS.launches.copy(), COUNTS.copies.copy()
        for call in self.calls:
            call()
        COUNTS.launches, COUNTS.copies = launches, copies  # which the host does not start

    def note_reads(self, tensors: Sequence[Tensor]) -> None:
        """Remember the memory that was there before the recording."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self.read |= {key: StorageWeakRef(storage) for key, storage in storages.items() if key not in self.made}

    def keep(self, tensor: Tensor) -> None:
        """Remember what a tensor holds before it is written to for the first time."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.originals:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.originals[storage.data_ptr()] = whole, whole.clone()


def is_current_stream_capturing() -> bool:
    """Whether a graph records."""
    return CUDAGraph.current is not None


def empty_cache() -> None:
    """Nothing: memory that is not used is no one's. It is an error while a pool is in use, as torch takes it."""
    assert not CUDAGraph.pools_in_use, "captures_underway.empty() INTERNAL ASSERT FAILED"


def end_allocate_to_pool(device: int, pool: list[CUDAGraph]) -> None:
    """End the use of a pool by a recording; an error if there is none."""
    if not any(pool is one for one in CUDAGraph.pools_in_use):
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    CUDAGraph.pools_in_use.clear()


def forbid(what: str) -> None:
    """Raise what CUDA raises if this happens while a graph records."""
    if CUDAGraph.current is not None:
        CUDAGraph.current.error = f"{NOT_PERMITTED}: {what}"
        raise RuntimeError(CUDAGraph.current.error)


def require_generator(name: str) -> None:
    """Raise what torch raises if a recording has failed and left its generator in the state of recording."""
    if CUDAGraph.has_failed and CUDAGraph.current is None and name in RANDOM:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record what is called, in one thread; the other modes fail if another thread copies at the same time."""
    assert capture_error_mode == "thread_local"
    empty_cache()
    before, CUDAGraph.stream = CUDAGraph.stream, STREAMS[1]
    random, launches, copies = torch.get_rng_state(), COUNTS.launches.copy(), COUNTS.copies.copy()
    CUDAGraph.current = cuda_graph
    if pool is not None:
        cuda_graph.neighbors = pool
        pool.append(cuda_graph)
    CUDAGraph.pools_in_use.append(cuda_graph.neighbors)
    try:
        yield
    finally:
        CUDAGraph.current, CUDAGraph.has_failed = None, bool(cuda_graph.error)
        cuda_graph.kernels = COUNTS.launches.total() - launches.total()
        COUNTS.launches, COUNTS.copies = launches, copies
        for whole, original in cuda_graph.originals.values():
            whole.copy_(original)
        torch.set_rng_state(random)
        cuda_graph.spoil()
        if cuda_graph.branches:
            cuda_graph.error = "CUDA error: capturing stream has unjoined work"
        if cuda_graph.error:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        CUDAGraph.stream = before
        CUDAGraph.pools_in_use.clear()


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Make a stream the current one; a recording would miss what is called there, if it is not one of its branches."""
    if CUDAGraph.current is not None and stream not in CUDAGraph.current.branches:
        forbid("a stream that is no branch of what is captured")
    before, CUDAGraph.stream = CUDAGraph.stream, stream
    try:
        yield
    finally:
        CUDAGraph.stream = before


def written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to; batch normalization does not declare its own."""
    found = []
    for place, argument in enumerate(function._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in ("running_mean", "running_var"):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    return found


def note(compute: Callable[[], Any], found: Any, inputs: Any, is_view: bool) -> None:
    """Add a call to the graph that records: at a replay, its results come to lie where ``found`` does."""
    if CUDAGraph.current is None or is_view:
        return
    addresses = {one.untyped_storage().data_ptr() for one in tree_leaves(inputs) if isinstance(one, Tensor)}
    outputs = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
    is_own = [one.untyped_storage().data_ptr() not in addresses for one in outputs]

    def again() -> None:
        with torch.no_grad():
            results = [one for one in tree_leaves(compute()) if isinstance(one, Tensor)]
            for output, result, own in zip(outputs, results, is_own, strict=True):
                if own:
                    output.copy_(result)

    CUDAGraph.current.calls.append(again)
    CUDAGraph.current.computed += [output for output, own in zip(outputs, is_own, strict=True) if own]
