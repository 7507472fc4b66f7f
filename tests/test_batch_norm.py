"""Batch normalisation over several processes: what one process computes over all examples."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distill_runner.models.images import CifarResNetConfig
from distill_runner.models.resnet import CifarResNet
from distill_runner.training.processes import (
    SINGLE_PROCESS,
    ProcessGroup,
    SyncBatchNorm2d,
    convert_sync_batch_norm,
)
from distill_runner.training.workers import spawn_group

CPU = torch.device("cpu")


class Update:
    """One update of a small network, its examples shared out unevenly; each process saves what it ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, group: ProcessGroup) -> None:
        torch.manual_seed(0)
        model = CifarResNet(CifarResNetConfig(depth=8, id2label=dict(enumerate("abc")))).double()
        images, labels = torch.randn(11, 3, 8, 8).double() * 3 + 5, torch.randint(0, 3, (11,))
        convert_sync_batch_norm(model, group)
        mine = slice(0, 7) if group.rank == 0 else slice(7, 11)
        mine = mine if group.size > 1 else slice(0, 11)
        loss = nn.functional.cross_entropy(model(images[mine]).logits, labels[mine], reduction="sum") / 11
        loss.backward()
        group.all_reduce_sum([p.grad for p in model.parameters() if p.grad is not None])
        found = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
        torch.save(found, self.folder / f"{group.size}-{group.rank}.pt")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("ends")
    update = Update(folder)
    update(SINGLE_PROCESS)
    with spawn_group([CPU, CPU], update) as group:
        update(group)
    return [torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1")]


@pytest.mark.slow
def test_two_processes_have_the_gradients_and_averages_of_one(ends: list[dict[str, Tensor]]) -> None:
    alone, *both = ends
    assert any("running_var" in name for name in alone)
    for found in both:
        assert found.keys() == alone.keys()
        for name, values in found.items():
            torch.testing.assert_close(values, alone[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.slow
def test_both_have_the_very_same_averages(ends: list[dict[str, Tensor]]) -> None:
    _, first, second = ends
    assert all(torch.equal(first[name], second[name]) for name in first if "running" in name)


def test_alone_nothing_is_replaced() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    convert_sync_batch_norm(model, SINGLE_PROCESS)
    assert type(model[0]) is nn.BatchNorm2d


def test_in_evaluation_it_is_torch_s_own() -> None:
    shared, plain = SyncBatchNorm2d(4).eval(), nn.BatchNorm2d(4).eval()
    images = torch.randn(3, 4, 5, 5)
    assert torch.equal(shared(images), plain(images))
