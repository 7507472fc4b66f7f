"""Updates of an epoch: which examples each has, in which batches, and what these weigh."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from distill_runner.datasets.batches import Batch, bucketed_order, epoch_order
from distill_runner.training.config import Optim
from distill_runner.training.data import Data
from distill_runner.training.processes import ALONE, ProcessGroup


@dataclass(frozen=True)
class Update:
    """One process's batches of an update of ``num_examples``; ``shares`` are their weights, 1 over all processes.

    ``noise`` is the seed of its dropout, in all processes.
    """

    num_examples: int
    batches: list[Batch]
    shares: list[float]
    noise: int


def steps(
    data: Data, optim: Optim, seed: int, epoch: int, first: int = 0, group: ProcessGroup = ALONE
) -> Iterator[Update]:
    """The updates of one epoch from the ``first`` on, counted from 0; processes share their batches out.

    Each is in ``optim.accumulation`` batches, fewer at the epoch's end; in more where they do not divide evenly, so
    that each process has as many. One that is left without an example stands in with another's at no weight: all have
    then gradients of the same parameters.
    """
    batch_size = optim.batch_size
    if optim.bucketing:
        order = bucketed_order(data.lengths, batch_size, seed, epoch)
    else:
        order = epoch_order(len(data), seed, epoch)
    passes = -(-optim.accumulation // group.size) * group.size
    for start in range(first * batch_size, len(order), batch_size):
        update = order[start : start + batch_size]
        parts = np.array_split(update, min(passes, len(update)))
        mine = parts[group.rank :: group.size]
        shares = [len(part) / len(update) for part in mine]
        noise = int(np.random.default_rng([seed, epoch, start]).integers(2**63))
        yield Update(len(update), [data.batch(part, epoch) for part in mine or parts[:1]], shares or [0.0], noise)


def weighed(update: Update, group: ProcessGroup = ALONE) -> list[Batch]:
    """The batches of an update with its dropout, and with what their means weigh in the update's.

    Examples differ in how many masked tokens they have: the mean over those of the update is not that of the batches'
    means by examples. All processes of the group call this together, to add up what each has.
    """
    shares_N1 = torch.tensor(update.shares, dtype=torch.float64)[:, None]
    counts_N2 = torch.tensor([[batch.num_outputs, batch.num_tokens] for batch in update.batches]) * (shares_N1 > 0)
    totals_2 = counts_N2.sum(0)
    group.add_up([totals_2])
    weights_N3 = torch.cat([shares_N1, (counts_N2.double() / totals_2).nan_to_num()], dim=1)
    return [
        replace(batch, weights=dict(zip(("example", "output", "token"), weights, strict=True)), noise=update.noise)
        for batch, weights in zip(update.batches, weights_N3.tolist(), strict=True)
    ]
