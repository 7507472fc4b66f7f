"""The teacher's features for a batch, computed live or read from a cache, from one teacher or a series of checkpoints.

A method cannot tell the difference. Live and cached targets both run the teacher on a multiple of 16 sequences,
repeating some if needed. The teacher's features of an example then do not depend on the other examples in the batch
(see ``batches``). Cached and live targets are equal bit for bit on a CPU.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from distill_runner.common.errors import UserError, override
from distill_runner.common.files import require_disk_space
from distill_runner.common.seeds import preserved_random_state
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import Split
from distill_runner.methods.base import Progress
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.training.data import batches_by_tokens
from distill_runner.training.devices import LOW_PRECISION, Device
from distill_runner.training.graphs import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCE_MULTIPLE = 16
"""The teacher runs on a multiple of this many sequences: matrix products of fewer rows may use another kernel."""
_NUMBERS = itertools.count()


class TeacherTargets(ABC):
    """The teacher's features that a method learns from: what is read for a batch, and the features that follow from it.

    The second part is a function of tensors on the device, and so can be a part of a recorded update.
    """

    device = Device(torch.device("cpu"), "fp32")

    @abstractmethod
    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Any:
        """Return a tree of tensors for a batch on the host, and for the features that are read now."""

    def features(self, prepared: Any) -> Features:
        """Return the features, from ``prepared`` on the device; by default they are the features."""
        features: Features = prepared
        return features

    def __call__(self, batch: Batch, progress: Progress | None = None, needs: FeatureRequest | None = None) -> Features:
        """Return the features of a batch on the host, in one call."""
        prepared = self.prepare(batch, progress, needs)  # which may open the teacher, and with it the device
        return self.features(self.device.move(prepared))


class NoTeacher(TeacherTargets):
    """Empty features, for methods that read no teacher."""

    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Features:
        return Features()


class LiveTargets(TeacherTargets):
    """A frozen teacher in eval mode, run as far as ``needs`` asks.

    A call may ask for fewer features, but gets all of ``needs`` if these can be cached. A teacher that runs through
    fewer layers would give other bits than the cache has.
    """

    def __init__(self, model: PreTrainedModel, split: Split, needs: FeatureRequest, device: Device) -> None:
        self.model = device.place(model).eval().requires_grad_(False)
        for layer in device.product_layers(model).values():  # whose weights autocast would round for each batch
            layer.to(LOW_PRECISION[device.precision])
        self.split, self.needs, self.device, self.number = split, needs, device, next(_NUMBERS)

    def prepare(self, batch: Batch, progress: Progress | None = None, needs: FeatureRequest | None = None) -> Any:
        """Return the teacher's own batch, and which of its sequences, tokens and outputs are those of ``batch``.

        With them comes the teacher's number, since a recorded update reads the weights of one teacher, where they lie.
        """
        if needs is None or not self.needs.of_tokens:
            needs = self.needs
        own_batch = self.split.teacher_batch(batch, SEQUENCE_MULTIPLE, self.device.length_multiple)
        (own_batch,) = fill([own_batch]) if batch.weights_of_tokens is not None else (own_batch,)
        place_of = {example: place for place, example in reversed([*enumerate(own_batch.index.tolist())])}
        # Only the outputs of words have a teacher with other examples, and then nothing else is read.
        sequences = torch.tensor([place_of.get(example, 0) for example in batch.index.tolist()])
        tokens = _tokens(own_batch, sequences, batch) if needs.of_tokens else slice(None)
        outputs = sequences if own_batch.head_tokens is None else _outputs(own_batch, batch)
        return self.number, own_batch, sequences, tokens, outputs, needs

    def features(self, prepared: Any) -> Features:
        _, own_batch, sequences, tokens, outputs, needs = prepared
        with torch.inference_mode(), self.device.autocast():
            features = extract(self.model, own_batch, needs)
        return features.full(sequences, tokens, outputs)


def _tokens(own_batch: Batch, sequences: Tensor, batch: Batch) -> Tensor:
    """Return the indices in ``own_batch`` of the tokens of ``batch``, given those of its ``sequences``."""
    first = own_batch.starts[sequences].repeat_interleave(batch.sequence_lengths, output_size=batch.num_tokens)
    return first + batch.positions


def _outputs(own_batch: Batch, batch: Batch) -> Tensor:
    """Return the indices of the outputs of ``own_batch`` that belong to those of ``batch``, of a head on tokens."""
    order = np.argsort(own_batch.output_index, kind="stable")
    return torch.from_numpy(order[np.searchsorted(own_batch.output_index, batch.output_index, sorter=order)])


class MeanTargets(TeacherTargets):
    """The mean of several teachers' predictions, without any other features.

    Args:
        teachers: live targets of the teachers, each on the split as tokenized for that teacher.
        mean: function that averages the teachers' outputs, see ``Outputs.ensemble_mean``.
    """

    def __init__(self, teachers: Sequence[LiveTargets], mean: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.teachers, self.mean = teachers, mean
        self.split, self.device = teachers[0].split, teachers[0].device

    def prepare(self, batch: Batch, progress: Progress | None = None, needs: FeatureRequest | None = None) -> Any:
        return [teacher.prepare(batch) for teacher in self.teachers]

    def features(self, prepared: Any) -> Features:
        pairs = zip(self.teachers, prepared, strict=True)
        return Features(self.mean([teacher.features(part).logits_OC for teacher, part in pairs]))


class MappedTargets(TeacherTargets):
    """Targets with ``function`` applied to their features, such as ``in_float16``."""

    def __init__(self, targets: TeacherTargets, function: Callable[[Features], Features]) -> None:
        self.targets, self.function, self.device = targets, function, targets.device

    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Any:
        return self.targets.prepare(batch, progress, needs)

    def features(self, prepared: Any) -> Features:
        return self.function(self.targets.features(prepared))


def in_float16(features: Features) -> Features:
    """Return features rounded to float16, bit for bit as a cache in float16 gives them."""
    logits = None if features.logits is None else features.logits.half().float()
    return Features(logits, {layer: states.half().float() for layer, states in features.cls.items()})


class CachedTargets(TeacherTargets):
    """Targets memory-mapped from a folder that ``write`` made for the same ``needs``.

    ``logits.npy`` (O, C) is indexed by output. ``cls.npy`` (N, K, H) is indexed by example, so that all layers of an
    example are read from one place. If only some examples were written, ``examples.npy`` and ``outputs.npy`` hold their
    sorted indices, one for each row of the other arrays.
    """

    def __init__(self, folder: Path, device: Device, needs: FeatureRequest) -> None:
        self.device, self.layers = device, sorted(needs.cls)
        self.arrays = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}
        self.examples, self.outputs = self.arrays.pop("examples", None), self.arrays.pop("outputs", None)

    def prepare(self, batch: Batch, progress: Progress | None = None, needs: FeatureRequest | None = None) -> Any:
        index, places = _places(self.examples, batch.index.numpy()), _places(self.outputs, batch.output_index)
        prepared = {"logits": torch.from_numpy(self.arrays["logits"][places])} if "logits" in self.arrays else {}
        if self.layers:
            prepared["cls"] = torch.from_numpy(self.arrays["cls"][index])
        return prepared

    def features(self, prepared: Any) -> Features:
        logits = prepared["logits"].float() if "logits" in prepared else None
        by_layer = prepared["cls"].float().transpose(0, 1).contiguous().unbind() if self.layers else ()
        return Features(logits, dict(zip(self.layers, by_layer, strict=True)))

    @staticmethod
    def write(
        folder: Path, teacher: LiveTargets | MeanTargets, dtype: str = "float32", examples: np.ndarray | None = None
    ) -> None:
        """Run the teacher once over its examples, longest last, and save its features as float32 or float16.

        Args:
            examples: sorted indices of the examples; None for all of them.

        Raises:
            UserError: an output is too large for float16.
        """
        split = teacher.split.teacher_inputs
        indices = np.arange(len(split)) if examples is None else examples
        groups = batches_by_tokens(split.lengths[indices], teacher.device, SEQUENCE_MULTIPLE)
        batches = [indices[places] for places in groups]
        outputs, num_outputs = None, split.num_outputs
        if examples is not None:
            outputs = np.sort(np.concatenate([split.batch(index).output_index for index in batches]))
            num_outputs = len(outputs)
            np.save(folder / "examples.npy", examples)
            np.save(folder / "outputs.npy", outputs)
        arrays: dict[str, Any] = {}

        def put(name: str, size: int, places: np.ndarray, values: Tensor) -> None:
            if name not in arrays:
                arrays[name] = _reserve_array(folder / f"{name}.npy", (size, *values.shape[1:]), np.dtype(dtype))
            if dtype == "float16" and (largest := values.abs().max().item()) > float(np.finfo(dtype).max):
                problem = f"the teacher's {name} reach {largest:.3g}, above float16's maximum of 65504"
                raise UserError("teacher.outputs", dtype, problem, override("teacher.outputs", "float32"))
            arrays[name][places] = values.cpu().numpy()

        for index in batches:
            batch = split.batch(index)
            features = teacher(batch)
            if features.logits is not None:
                put("logits", num_outputs, _places(outputs, batch.output_index), features.logits)
            if layers := sorted(features.cls):
                states = torch.stack([features.cls[layer] for layer in layers], dim=1)
                put("cls", len(indices), _places(examples, batch.index.numpy()), states)
        for array in arrays.values():
            array.flush()


def _places(cached_indices: np.ndarray | None, indices: np.ndarray) -> np.ndarray:
    """Return the places of ``indices`` in an array that holds those of the sorted ``cached_indices`` (None: all)."""
    return indices if cached_indices is None else np.searchsorted(cached_indices, indices)


def _reserve_array(file: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Create an array in a file and allocate its disk space now; a disk that fills up later would kill the process.

    Raises:
        Unavailable: the disk has not enough free space.
    """
    require_disk_space(file.parent, dtype.itemsize * prod(shape), "the teacher's outputs")
    array = np.lib.format.open_memmap(file, "w+", dtype, shape)
    with file.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
    return array


class CheckpointTargets(TeacherTargets):
    """Targets from a series of checkpoints of one teacher, one after the other.

    Args:
        route: for each of the student's epochs, the number of the checkpoint to learn from.
        open_checkpoint: function that returns the targets of the checkpoint with a given number. It is called when that
            checkpoint is needed, after the previous targets have been freed.
    """

    def __init__(self, route: Sequence[int], open_checkpoint: Callable[[int], TeacherTargets]) -> None:
        self.route, self.open_checkpoint = route, open_checkpoint
        self.number: int | None = None
        self.targets: TeacherTargets = NoTeacher()

    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Any:
        assert progress is not None
        number = self.route[progress.epoch]
        if number != self.number:
            self.targets = NoTeacher()  # frees the previous model before the next one is loaded
            with preserved_random_state():  # building a model draws random numbers, but reading a cache does not
                self.targets = self.open_checkpoint(number)
            self.number, self.device = number, self.targets.device
        return self.targets.prepare(batch, progress, needs)

    def features(self, prepared: Any) -> Features:
        return self.targets.features(prepared)
