"""Batch normalisation over several processes: what one process computes over all examples."""

import numpy as np
import pytest
import torch
from torch import nn

from distill_runner.models.images import CifarResNet, CifarResNetConfig
from distill_runner.training.processes import (
    SINGLE_PROCESS,
    ProcessGroup,
    SyncBatchNorm2d,
    convert_sync_batch_norm,
)
from helpers.torchrun import in_processes


def update(group: ProcessGroup) -> dict[str, np.ndarray]:
    """Return gradients and averages of a small network after one update, its examples shared out unevenly."""
    torch.manual_seed(0)
    model = CifarResNet(CifarResNetConfig(depth=8, id2label=dict(enumerate("abc")))).double()
    images, labels = torch.randn(11, 3, 8, 8).double() * 3 + 5, torch.randint(0, 3, (11,))
    convert_sync_batch_norm(model, group)
    own = slice(0, 11) if group.size == 1 else slice(0, 7) if group.is_main else slice(7, 11)
    loss = nn.functional.cross_entropy(model(images[own]).logits, labels[own], reduction="sum") / 11
    loss.backward()
    group.all_reduce_sum([p.grad for p in model.parameters() if p.grad is not None])
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: buffer.numpy() for name, buffer in model.named_buffers()}


@pytest.mark.slow
def test_two_processes_have_the_gradients_and_averages_of_one() -> None:
    (alone,), both = in_processes(1, update), in_processes(2, update)
    assert any("running_var" in name for name in alone)
    for values in both:
        assert values.keys() == alone.keys()
        for name in alone:
            np.testing.assert_allclose(values[name], alone[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert all(np.array_equal(both[0][name], both[1][name]) for name in alone if "running" in name)


def test_alone_nothing_is_replaced() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    convert_sync_batch_norm(model, SINGLE_PROCESS)
    assert type(model[0]) is nn.BatchNorm2d


def test_in_evaluation_it_is_torch_s_own() -> None:
    shared, plain = SyncBatchNorm2d(4).eval(), nn.BatchNorm2d(4).eval()
    images = torch.randn(3, 4, 5, 5)
    assert torch.equal(shared(images), plain(images))
