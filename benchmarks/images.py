"""Time an update of ResNet-20 -> ResNet-8, and compare it with two loops over the same images.

    python -m benchmarks.images [--teacher 20] [--steps 20] [--repeats 3] [--views 8] [--size 32] [--batch 128]
    python -m benchmarks.images --precision bf16 --sides vectorized distill_run --threads 1

The plain loop uses torch's defaults: a ``DataLoader`` with two workers that crop, flip and normalize image by image,
the teacher at every step, channels-first memory. The vectorized loop is what an experienced engineer writes: it crops,
flips and normalizes a batch at once, in channels-last memory and the same precision, with a fused optimizer. All sides
start from the same weights and see the same images in the same order. It prints the largest difference of their losses.

The sides run in turns, so that other work on the machine affects them equally: first with a live teacher, then with
cached views. Ratios are of medians over all steps except the first two of a turn, by wall clock and by the CPU seconds
of the training process, which do not count the loader's workers. With views the loops draw the same fixed images. The
teacher's pass over these images, which happens once, is timed separately.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.loss import divergence
from benchmarks.machine import describe
from distill_runner.common.library_switches import computation_mode
from distill_runner.common.seeds import seed_all
from distill_runner.datasets.image_splits import ImageSplit, augment_images
from distill_runner.datasets.images import Augment
from distill_runner.methods.config import parse_method
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.images import CifarResNet, CifarResNetConfig
from distill_runner.tasks import make_task
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import TaskData, epoch_order
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets
from distill_runner.training.train import Training

AUGMENT, MEAN, DEVIATION = Augment(pad=4, flip=True), (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
SEED, TEMPERATURE, CLASSES = 5, 5.0, 10
VANILLA = {
    "terms": {"ce": {"term": "hard_labels"}, "kd": {"term": "soft_labels", "temperature": TEMPERATURE}},
    "weights": {"ce": 0.5, "kd": 0.5},
}
Turn = tuple[list[float], list[float], list[float]]
"""Seconds and CPU seconds of each step except the first two, and the losses of all steps."""
SIDES = ("plain", "vectorized", "distill_run")


class OneByOne(Dataset[tuple[Tensor, int]]):
    """Data set that prepares images one by one, as most scripts do."""

    def __init__(self, split: ImageSplit) -> None:
        self.split, self.seed = split, SEED if split.num_views is None else 0

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image, index = torch.from_numpy(self.split.images[[number]]), torch.tensor([number])
        picture = augment_images(AUGMENT, image, index, self.seed, 0)[0].permute(2, 0, 1).contiguous().float() / 255
        mean, deviation = (torch.tensor(part)[:, None, None] for part in (MEAN, DEVIATION))
        return (picture - mean) / deviation, int(self.split.labels[number])


def network(depth: int) -> CifarResNet:
    seed_all(depth)
    return CifarResNet(CifarResNetConfig(depth=depth, id2label={n: str(n) for n in range(CLASSES)}))


def teacher_of(depth: int, split: ImageSplit) -> CifarResNet:
    """Return a network whose statistics are those of 32 images; without them, rounding grows with each layer."""
    teacher = network(depth).train()
    for module in teacher.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        teacher(split.batch(np.arange(32)).pixel_values)
    return teacher.eval()


def plain(split: ImageSplit, depth: int, optim: Optim, device: Device) -> Turn:
    order = epoch_order(len(split), SEED, 0).tolist()
    loader = DataLoader(OneByOne(split), optim.batch_size, sampler=order, num_workers=2)
    return timed(loop(loader, teacher_of(depth, split), network(8).train(), optim, device, None))


def vectorized(split: ImageSplit, depth: int, optim: Optim, device: Device) -> Turn:
    order = epoch_order(len(split), SEED, 0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(order), optim.batch_size):
            rows = order[start : start + optim.batch_size]
            batch = split.training_batch(rows, SEED, 0)
            yield batch.pixel_values.contiguous(memory_format=torch.channels_last), batch.labels

    teacher: Any = teacher_of(depth, split)
    student: Any = network(8).train()
    for model in (teacher, student):
        model.to(memory_format=torch.channels_last)
    return timed(loop(batches(), teacher, student, optim, device, fused=True))


def loop(
    batches: Any, teacher: CifarResNet, student: CifarResNet, optim: Optim, device: Device, fused: bool | None
) -> Iterator[float]:
    how: Any = {"lr": optim.lr, "momentum": optim.momentum, "weight_decay": optim.weight_decay, "fused": fused}
    optimizer = torch.optim.SGD(student.parameters(), **how)
    for pictures, labels in batches:
        with device.autocast():
            with torch.no_grad():
                teacher_logits = teacher(pictures).logits
            logits = student(pictures).logits
        soft = TEMPERATURE**2 * divergence(logits.float(), teacher_logits.float(), TEMPERATURE)
        loss = 0.5 * torch.nn.functional.cross_entropy(logits.float(), labels) + 0.5 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def distill_run(split: Any, depth: int, optim: Optim, device: Device, cache: Path | None = None) -> Turn:
    live = LiveTargets(teacher_of(depth, split), split, FeatureRequest(logits=True), device)
    student: Any = network(8)
    fields = {"name": "random", "dataset": "nowhere", "columns": ["image"], "epochs": 1, "metrics": ["accuracy"]}
    task = make_task(**fields, type="images", labels=[str(n) for n in range(CLASSES)], validation={"test": "test"})
    shape = EncoderShape.from_config(student.config)
    method = parse_method(VANILLA).make().bind(shape, EncoderShape.from_config(live.model.config), task.outputs)
    losses: list[float] = []

    with TemporaryDirectory() as folder:
        targets = live if cache is None else CachedTargets(cache, device, FeatureRequest(logits=True))
        training = Training(
            student,
            method,
            TaskData(task, split, {}, device, seed=SEED),
            targets,
            optim=optim,
            seed=SEED,
            device=device,
            runtime=Runtime(log_every=1),
            folder=Path(folder),
            log_metrics=lambda values, step, epoch: losses.append(values["loss"]) if "loss" in values else None,
        )

        def updates() -> Iterator[float]:
            for update in training.rest_of_epoch():
                training.take_update(update)
                yield losses[-1]

        with computation_mode():
            return timed(updates())


def timed(updates: Iterator[float]) -> Turn:
    losses, times = [], [(time.perf_counter(), time.process_time())]
    for loss in updates:
        times.append((time.perf_counter(), time.process_time()))
        losses.append(loss)
    seconds, cpu_seconds = np.diff(times, axis=0)[2:].T.tolist()
    return seconds, cpu_seconds, losses


def random_images(folder: Path, count: int, size: int) -> None:
    rng = np.random.default_rng(0)
    np.save(folder / "images.npy", rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, CLASSES, count))


def compare(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    random_images(folder, options.batch * options.steps, options.size)
    recipe: Any = {
        "name": "sgd",
        "schedule": "constant",
        "warmup": 0,
        "decay": "all",
        "weight_decay": 1e-4,
        "clip": None,
    }
    optim = Optim(lr=0.1, batch_size=options.batch, max_steps=options.steps, epochs=1, **recipe)
    endless, fixed = (ImageSplit(folder, (MEAN, DEVIATION), AUGMENT, views) for views in (None, options.views))
    cache = folder / "targets"
    cache.mkdir()
    started, device = time.perf_counter(), Device.from_name("cpu", options.precision)
    data: Any = fixed
    live = LiveTargets(teacher_of(options.teacher, fixed), data, FeatureRequest(logits=True), device)
    CachedTargets.write(cache, live)
    yield f"teacher's pass over {options.views} views of {len(fixed)} images: {time.perf_counter() - started:.1f} s"
    for name, split, targets in (("live", endless, None), (f"{options.views} views", fixed, cache)):
        sides: dict[str, Callable[..., Turn]] = {"plain": plain, "vectorized": vectorized}
        sides["distill_run"] = partial(distill_run, cache=targets)
        turns: dict[str, list[Turn]] = {side: [] for side in options.sides}
        for _ in range(options.repeats):
            for side in options.sides:
                turns[side].append(sides[side](split, options.teacher, optim, device))
        medians = {
            side: [statistics.median([s for turn in part for s in turn[clock]]) for clock in (0, 1)]
            for side, part in turns.items()
        }
        own = medians["distill_run"]
        for side, loop_times in medians.items():
            wall, cpu = (f"{1000 * seconds:.0f} ms" for seconds in loop_times)
            ratios = ", ".join(f"{other / mine:.2f}" for other, mine in zip(loop_times, own, strict=True))
            pairs = zip(turns[side][0][2], turns["distill_run"][0][2], strict=True)
            difference = max(abs(loss - own_loss) for loss, own_loss in pairs)
            yield f"{name}, {side}: {wall}, CPU {cpu}; ratios {ratios}; losses differ by at most {difference:.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("teacher", 20), ("steps", 20), ("repeats", 3), ("views", 8), ("size", 32), ("batch", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--sides", nargs="+", default=SIDES, help=f"of {', '.join(SIDES)}; distill_run is needed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(describe(), flush=True)
    with TemporaryDirectory() as folder:
        for line in compare(Path(folder), options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
