"""Updates as CUDA graphs: a GPU then runs all kernels of an update without waiting for Python between them.

An update is a function of tensors. It is called directly for the first inputs of each shape, which also warms up the
libraries that it uses. For the second inputs of a shape it is recorded as a graph, and replayed from then on. Every
update thus happens once, and a resumed run is the same run.

Shapes repeat because batches of texts are filled up: ``fill`` appends sequences of weight 0.
"""

import logging
import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.common.errors import first_line
from distill_runner.datasets.batches import Batch, length_groups, rounded_up
from distill_runner.methods.base import Progress
from distill_runner.training.devices import Device, shape_of

log = logging.getLogger(__name__)

Part = tuple[Batch, Any]
"""A batch with its weights, and what the teacher's features follow from."""
TakeUpdate = Callable[[Iterable[Part], Tensor, Progress], dict[str, Tensor]]

TOKEN_STEP, OUTPUT_STEP, LENGTH_STEP = 128, 32, 32
"""Numbers of tokens, of outputs of a head on tokens, and of tokens of the longest text are rounded up to multiples."""


def fill(batches: Iterable[Batch]) -> list[Batch]:
    """Append sequences of weight 0 to the batches of an update, so that few numbers of tokens and outputs occur.

    The batches are on the host, and all have as many tokens, so that the shapes of an update of several repeat as well.
    The weights of the other examples are raised so that means over the units of the batch stay what they are. No batch
    has a seed of its own for dropout any more: a GPU's kernels draw the numbers themselves.
    """
    batches = [replace(batch, dropout_seed=None) for batch in batches]
    if not all(isinstance(batch, Batch) for batch in batches):
        return batches
    longest = rounded_up(max(group.is_token.shape[1] for batch in batches for group in batch.groups), LENGTH_STEP)
    tokens, outputs = max(batch.num_tokens for batch in batches), max(batch.num_outputs for batch in batches)
    most = TOKEN_STEP if len(batches) == 1 else tokens + TOKEN_STEP  # tokens that one of the batches may lack
    extra = math.ceil(most / longest) + 1
    sizes = (longest, extra, rounded_up(tokens + extra, TOKEN_STEP), rounded_up(outputs + 1, OUTPUT_STEP))
    return [_filled(batch, *sizes) for batch in batches]


def _filled(batch: Batch, longest: int, extra: int, total: int, total_outputs: int) -> Batch:
    """Return the batch with ``extra`` sequences, ``total`` tokens and, of a head on some tokens, ``total_outputs``."""
    size, tokens = batch.size, batch.num_tokens
    lengths = np.array([len(part) for part in np.array_split(np.arange(total - tokens), extra)])
    starts = np.concatenate([batch.starts.numpy(), tokens + np.cumsum(lengths) - lengths])
    all_lengths = np.concatenate([batch.sequence_lengths.numpy(), lengths])

    def repeated(values: Any, count: int) -> Any:
        """The same followed by copies of its first row."""
        return None if values is None else torch.cat([values, values[:1].expand(count, *values.shape[1:])])

    def zeros(values: Any, count: int) -> Any:
        return None if values is None else torch.cat([values, values.new_zeros(count, *values.shape[1:])])

    weights = torch.ones(size) if batch.example_weights is None else batch.example_weights
    own, added = batch.num_outputs, extra
    outputs = dict[str, Any]()
    if (head_tokens := batch.head_tokens) is not None:
        reads_all = own == tokens
        added = (total if reads_all else total_outputs) - own
        new = torch.arange(tokens, total) if reads_all else torch.full((added,), tokens)
        outputs["head_tokens"] = torch.cat([head_tokens, new.to(head_tokens)])
        outputs["weights_of_outputs"] = _scaled(batch.output_weights, own, added)
        outputs["output_numbers"] = repeated(batch.output_numbers, added)
    labels = batch.labels  # of outputs, of examples or, in a batch of rows of texts, of the rows, which stay
    if batch.texts_of_rows is None:
        labels = zeros(labels, added if labels is not None and len(labels) == own else extra)
    return replace(
        batch,
        input_ids=repeated(batch.input_ids, total - tokens),
        segments=repeated(batch.segments, total - tokens),
        positions=zeros(batch.positions, total - tokens),
        starts=torch.from_numpy(starts),
        index=repeated(batch.index, extra),
        groups=tuple(length_groups(all_lengths, starts, None, longest)),
        labels=labels,
        is_next=zeros(batch.is_next, extra),
        skipped=zeros(batch.skipped, extra),
        example_weights=_scaled(weights, size, extra),
        weights_of_tokens=_scaled(batch.token_weights, tokens, total - tokens),
        **outputs,
    )


def _scaled(weights: Tensor | None, own: int, added: int) -> Tensor:
    """Weights whose mean over all units, with ``added`` ones of weight 0, weighs the own ones as before."""
    weights = torch.ones(own) if weights is None else weights
    scale = (own + added) / max(own, 1)  # a batch may have no masked token
    return torch.cat([weights * scale, weights.new_zeros(added)])


class ProgressReads:
    """The progress of training for the terms of an update, and what they read of it."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.names = progress, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.progress, name)


_recording = partial(torch.cuda.graph, capture_error_mode="thread_local")


@dataclass
class _Recorded:
    """Graph of the inputs of one shape: the block in which they lie, and its outputs."""

    block: Tensor
    graph: torch.cuda.CUDAGraph
    names: list[str]
    values: Tensor


class Graphs:
    """Updates, called directly or replayed.

    Args:
        obstacle: why updates cannot be recorded; empty if they can.
    """

    def __init__(self, device: Device, obstacle: str = "") -> None:
        self.device = device
        self.recorded: dict[Hashable, _Recorded | None] = {}
        self.reads = set[str]()
        self.is_on = device.torch.type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if self.is_on else None
        if self.is_on and obstacle:
            self._give_up(obstacle)

    def __call__(
        self, update: TakeUpdate, parts: Iterable[Part], rate: Tensor, progress: Progress, graph_key: Hashable
    ) -> dict[str, Tensor]:
        """Take an update.

        Args:
            update: function of the parts of an update, the learning rate and the progress; the same in all calls. It
                returns scalars by name.
            parts: batches, on the host, and what their targets follow from.
            rate: the learning rate, on the host.
            graph_key: all that ``update`` depends on besides its arguments; another one gets graphs of its own.
        """
        if not self.is_on:
            return update(map(self.device.move, parts), self.device.move(rate), progress)
        inputs = (tuple(parts), rate)
        key = (graph_key, *(getattr(progress, name) for name in sorted(self.reads)), shape_of(inputs))
        if key in self.recorded:
            recorded = self.recorded[key] = self.recorded[key] or self._record(update, inputs, progress)
            if recorded is not None:
                recorded.block.copy_(self.device.pinned(inputs), non_blocking=True)
                recorded.graph.replay()
                return dict(zip(recorded.names, recorded.values.clone().unbind(), strict=True))
        reads = ProgressReads(progress)
        values = self._directly(update, inputs, reads)
        if "step" in reads.names:
            self._give_up("a term reads the number of the step")
        else:
            self.recorded[key] = None  # never met again if it lacks a name that this update was the first to read
        self.reads |= reads.names
        return values

    def _directly(self, update: TakeUpdate, inputs: tuple[Any, Tensor], progress: Any) -> dict[str, Tensor]:
        """Take an update without a graph. If it does not fit into memory beside the graphs, they are given up."""
        if any(self.recorded.values()):
            try:
                return update(*self.device.move(inputs), progress)
            except torch.OutOfMemoryError as error:
                self._give_up(first_line(error))
        return update(*self.device.move(inputs), progress)

    def _record(self, update: TakeUpdate, inputs: tuple[Any, Tensor], progress: Progress) -> _Recorded | None:
        """Record the update of ``inputs``, which are copied to where the graph reads them; None if it cannot be."""
        block, (parts, rate) = self.device.block_of(inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _recording(graph, self.pool):
                outputs = update(parts, rate, progress)
                values = torch.stack(list(outputs.values()))
        except RuntimeError as error:
            self._give_up(first_line(error.__context__ or error))  # as the recording ends, CUDA raises another
            end_failed_recording(stream, self.pool)
            return None
        return _Recorded(block, graph, list(outputs), values)

    def _give_up(self, reason: str) -> None:
        self.is_on = False
        self.recorded.clear()
        log.info("updates run without graphs: %s", reason)


def end_failed_recording(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what torch leaves of a recording that failed: its stream, its use of ``pool``, and a generator that records.

    Args:
        stream: the current stream before the recording.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # since 2.13 nothing is left of it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)  # private: torch itself forgets it until 2.12
    with _recording(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=stream.device)
