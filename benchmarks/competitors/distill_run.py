"""distill-run's training without evaluation and checkpoints.

``graphs`` records updates on a GPU. Several ``students`` learn from the same batches there, with the updates of all as
branches of one graph, as points of a grid could.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitors import Train
from benchmarks.setting import BATCH, LR, WEIGHT_DECAY, Setting
from distill_runner.common.library_switches import computation_mode
from distill_runner.methods.base import Progress
from distill_runner.training.config import Optim, Precision, Runtime
from distill_runner.training.data import TaskData
from distill_runner.training.devices import Device
from distill_runner.training.graphs import Part
from distill_runner.training.teachers import TeacherTargets
from distill_runner.training.train import Training

RECORDING, MEASURED = 2, 5
"""Passes over the same updates on a GPU: the first two record their graphs, as a run of many epochs soon has."""


def make(
    setting: Setting,
    dtype: torch.dtype = torch.float32,
    precision: Precision = "fp32",
    graphs: bool = True,
    log_every: int = 10,
    students: int = 1,
) -> Train:
    device, tokens = Device.from_name(setting.device, precision), setting.tokens()
    data = TaskData(setting.task, tokens, {}, device)
    targets: TeacherTargets = setting.targets(device)
    if dtype != torch.float32:  # the cache holds float32 only
        targets = setting.live_targets(device, dtype)

    @computation_mode()
    def train(student: Any, steps: int, when_recorded: Callable[[], object] | None = None) -> list[float]:
        """Train; with a callback, take the same updates often, and call it when all of them are graphs."""
        passes = 1 if when_recorded is None else RECORDING + MEASURED
        curve: list[float] = []
        optim = {"lr": LR, "weight_decay": WEIGHT_DECAY, "batch_size": BATCH, "schedule": "constant", "warmup": 0}
        with tempfile.TemporaryDirectory() as folder:
            training, *others = [
                Training(
                    model,
                    setting.stage.build_method().to(dtype),
                    data,
                    targets,
                    optim=Optim(epochs=passes, max_steps=max(1, passes * steps), **optim),
                    seed=0,
                    device=device,
                    runtime=Runtime(log_every=log_every, graphs=graphs),
                    folder=Path(folder),
                    log_metrics=lambda values, step, epoch: curve.append(values["loss"]),
                    select_best=True,
                )
                for model in (student, *(deepcopy(student) for _ in range(students - 1)))
            ]
            if others:
                join(training, others)
            for number in range(passes):
                if when_recorded is not None and number == RECORDING:
                    when_recorded()
                for update in islice(training.rest_of_epoch(), steps):
                    training.take_update(update)
                training.history.position = 0  # the next pass has the same batches
            with training.full_model() as model:
                embedding = model.get_input_embeddings()
            student.set_input_embeddings(embedding)
        return curve

    return train


def join(first: Training, others: Sequence[Training]) -> None:
    """Let an update of ``first`` also be one of the ``others``, on the same batch, each on a stream of its own."""
    for other in others:
        other.model.train()
        other.method.train()
        other.method.begin_epoch(other.progress)
    updates = [training.take_update_on_device for training in (first, *others)]
    streams = [torch.cuda.Stream() for _ in updates]

    def all_updates(parts: Iterable[Part], rate: torch.Tensor, progress: Progress) -> dict[str, torch.Tensor]:
        parts, current, values = tuple(parts), torch.cuda.current_stream(), []
        for stream, update in zip(streams, updates, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                values.append(update(parts, rate, progress))
        for stream in streams:
            current.wait_stream(stream)
        return values[0]

    first.take_update_on_device = all_updates  # type: ignore[method-assign]
