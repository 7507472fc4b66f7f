"""Batch normalization in several processes: torch's own for GPUs, and refused on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from distill_runner.models.images import CifarResNet, CifarResNetConfig
from distill_runner.training.processes import ProcessGroup, share_batch_norm


@pytest.mark.parametrize("size", [1, 2])
def test_processes_share_its_statistics(size: int) -> None:
    model = CifarResNet(CifarResNetConfig(depth=8, id2label=dict(enumerate("abc"))))
    names, outputs = [*model.state_dict()], model.eval()(torch.ones(2, 3, 8, 8)).logits
    share_batch_norm(model, ProcessGroup(0, size), torch.device("cuda"))
    kinds = {type(module) for module in model.modules()} & {nn.BatchNorm2d, nn.SyncBatchNorm}
    assert kinds == {nn.SyncBatchNorm if size > 1 else nn.BatchNorm2d}
    assert [*model.state_dict()] == names
    assert model(torch.ones(2, 3, 8, 8)).logits.equal(outputs)


@pytest.mark.slow
def test_several_processes_on_cpus_are_refused(tmp_path: Path) -> None:
    images = (
        "task=demo_digits",
        "teacher=resnet",
        "teacher.depth=8",
        "student=resnet8",
        "method=nkd",
        "optim.epochs=1",
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    ended = subprocess.run(
        [*command, "distill_runner", *images, "runtime.device=cpu", f"store.dir={tmp_path}/store"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode
    assert "runtime.device=cpu: several processes share batch normalization on GPUs only" in ended.stderr
    assert ended.stderr.count("Traceback") == 1  # torchrun's own
