"""The divergence of relations: a float64 reference written out row by row, gradients, blocks, padding, memory."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import gradcheck

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.attention import relation_kl, row_weights

Array = NDArray[np.float64]
RAGGED = (1, 3, 5, 16, 17, 20, 40)


def pack(lengths: Sequence[int], folder: Path, length_multiple: int | None = 16) -> Batch:
    np.save(folder / "ids.npy", np.arange(sum(lengths), dtype=np.int32))
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
    np.save(folder / "segments.npy", np.zeros(sum(lengths), dtype=np.int8))
    return TokenSplit(folder).batch(range(len(lengths)), length_multiple)


def sides(batch: Batch, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (2, len(batch.input_ids), width)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64))


def reference(teacher: tuple[Tensor, Tensor], student: tuple[Tensor, Tensor], heads: int, batch: Batch) -> Array:
    """The divergence of every row, one at a time, mean over heads: (T,)."""

    def relation(x: Array, y: Array) -> Array:
        scores = x @ y.T / math.sqrt(x.shape[1])
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows: Array = powers / powers.sum(axis=1, keepdims=True)
        return rows

    bounds = [*batch.starts.tolist(), len(batch.input_ids)]
    rows = np.zeros(bounds[-1])
    for start, stop in itertools.pairwise(bounds):
        for head in range(heads):
            taught, learnt = (
                relation(*(np.split(side[start:stop].detach().numpy(), heads, axis=1)[head] for side in of_model))
                for of_model in (teacher, student)
            )
            rows[start:stop] += (taught * np.log(taught / learnt)).sum(axis=1) / heads
    return rows


@pytest.mark.parametrize("length_multiple", [16, None])
@pytest.mark.parametrize("block", [2**20, 1, 1000])
@pytest.mark.parametrize(("widths", "heads"), [((12, 12), 4), ((24, 12), 6), ((12, 30), 3), ((10, 15), 5)])
def test_equals_the_reference_on_ragged_lengths(
    length_multiple: int | None, block: int, widths: tuple[int, int], heads: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("distill_runner.methods.attention.BLOCK_SIZE", {"cpu": block})
    batch = pack(RAGGED, tmp_path, length_multiple)
    teacher, student = sides(batch, widths[0], 0), sides(batch, widths[1], 1)
    rows = reference(teacher, student, heads, batch)
    lengths = np.diff([*batch.starts.tolist(), len(rows)])
    parts = np.split(rows, batch.starts[1:].numpy())
    expected = {"token": rows.mean(), "sequence": np.mean([part.mean() for part in parts])}
    assert lengths.tolist() == sorted(RAGGED)
    assert abs(expected["token"] - expected["sequence"]) > 1e-3
    for over in ("token", "sequence"):
        found = relation_kl(teacher, student, heads, batch.groups, row_weights(batch, over))
        assert found.item() == pytest.approx(expected[over], rel=1e-12)


def test_by_hand(tmp_path: Path) -> None:
    # Two tokens, one head of one feature: scores are products. The teacher's rows are (3/4, 1/4) and (1/2, 1/2).
    batch = pack([2], tmp_path)
    teacher = (torch.tensor([[1.0], [0.0]]), torch.tensor([[math.log(3)], [0.0]]))
    student = (torch.zeros(2, 1), torch.ones(2, 1))  # rows (1/2, 1/2)
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    found = relation_kl(teacher, student, 1, batch.groups, row_weights(batch, "sequence"))
    assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize("same", [False, True], ids=["x and y", "x with itself"])
def test_gradients_are_the_numerical_ones(same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill_runner.methods.attention.BLOCK_SIZE", {"cpu": 700})
    batch = pack([1, 3, 4, 18], tmp_path)
    teacher = sides(batch, 12, 0)
    x, y = (side[:, :6].clone().requires_grad_() for side in sides(batch, 6, 1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return 3 * relation_kl(teacher, (x, x if same else y), 2, batch.groups, row_weights(batch, "token"))

    assert gradcheck(loss, (x, y), fast_mode=True)
    assert gradcheck(lambda y: loss(x.detach(), y), (y,), fast_mode=True)


def test_gradients_equal_those_of_autograd_through_padded_attention(tmp_path: Path) -> None:
    """Against what a first script would write: padded, masked, both distributions whole."""
    batch, heads = pack(RAGGED, tmp_path), 4
    teacher, student = sides(batch, 8, 0), sides(batch, 12, 1)
    _, _, mask = batch.to_padded()

    def relation(x: Tensor, y: Tensor) -> Tensor:
        padded = [torch.zeros(*mask.shape, x.shape[1], dtype=x.dtype) for _ in "xy"]
        for whole, side in zip(padded, (x, y), strict=True):
            whole[mask.bool()] = side
        x_BALD, y_BALD = (whole.unflatten(-1, (heads, -1)).transpose(1, 2) for whole in padded)
        scores = x_BALD @ y_BALD.transpose(2, 3) / x_BALD.shape[-1] ** 0.5
        return scores.masked_fill(mask[:, None, None] == 0, -1e9).log_softmax(-1)

    def naive(x: Tensor, y: Tensor) -> Tensor:
        taught, learnt = relation(*teacher), relation(x, y)
        rows_BAL = (taught.exp() * (taught - learnt)).sum(-1) * mask[:, None]
        return (rows_BAL.sum((1, 2)) / mask.sum(1)).mean() / heads

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return relation_kl(teacher, (x, y), heads, batch.groups, row_weights(batch, "sequence"))

    values = []
    for loss in (naive, ours):
        inputs = [side.clone().requires_grad_() for side in student]
        value = loss(*inputs)
        value.backward()
        values.append([value.detach(), *(side.grad for side in inputs)])
    for mine, theirs in zip(*values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
