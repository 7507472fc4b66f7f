"""torchdistill 1.1.5: its distillation box, its hooks on layers, and ALP-KD's loss registered as a criterion.

Texts are padded to the maximum length or, with ``tuned``, to the longest text of a batch, as in its GLUE examples.

Its own GLUE loop passes no labels to the criterion, and ``KDLoss`` then omits cross entropy and T². Here the criterion
gets the labels. ``accelerate`` is not used, since it does nothing in a step on a CPU.

torchdistill needs torchvision for images only, and torchvision has no build for every torch. Empty classes replace
torchvision if it is missing.
"""

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from benchmarks.competitors import Train
from benchmarks.loss import layer_distance, loss_of
from benchmarks.setting import LR, WEIGHT_DECAY, Setting

PARTS = ("", ".datasets", ".models", ".models.densenet", ".models.resnet")


class Absent(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if importlib.util.find_spec("torchvision") is None:
    sys.modules |= {name: Absent(name) for name in (f"torchvision{part}" for part in PARTS)}

from torchdistill.core.distillation import get_distillation_box  # noqa: E402
from torchdistill.losses.registry import register_mid_level_loss  # noqa: E402


@register_mid_level_loss
class AlpKd(torch.nn.Module):
    """ALP-KD's whole loss, computed from the outputs of modules, by their path."""

    def __init__(self, layers: Mapping[int, list[int]]) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, student: Any, teacher: Any, labels: torch.Tensor) -> torch.Tensor:
        def cls(side: Any, layer: int) -> torch.Tensor:
            state: torch.Tensor = side[_path(layer)]["output"][:, 0]
            return state

        distances = [
            layer_distance(cls(student, j), [cls(teacher, k) for k in entry]) for j, entry in self.layers.items()
        ]
        return loss_of(student["classifier"]["output"], teacher["classifier"]["output"], labels, distances)


def make(setting: Setting, tuned: bool = False) -> Train:
    teacher, layers = setting.teacher(), setting.layers
    batches = setting.padded(None if tuned else setting.max_length)
    read = sorted({k for entry in layers.values() for k in entry})

    def train(student: Any, steps: int) -> list[float]:
        config = {
            "num_epochs": 1,
            "teacher": _side(read) | {"requires_grad": False},
            "student": _side(layers),
            "optimizer": {
                "key": "AdamW",
                "kwargs": {"lr": LR, "weight_decay": WEIGHT_DECAY},
                "max_grad_norm": 1.0,
            },
            "criterion": {
                "key": "WeightedSumLoss",
                "kwargs": {
                    "sub_terms": {"alp": {"criterion": {"key": "AlpKd", "kwargs": {"layers": layers}}, "weight": 1.0}}
                },
            },
        }
        box, curve = get_distillation_box(teacher, student, {}, config, torch.device("cpu"), None, False, 1), []
        box.pre_epoch_process(epoch=0)
        for batch in batches[:steps]:
            inputs = {name: part for name, part in batch.items() if name != "labels"}
            loss = box.forward_process(inputs, batch["labels"], supp_dict=None)
            box.post_forward_process(loss=loss)
            curve.append(loss.item())
        box.clean_modules()
        return curve

    return train


def _side(layers: Any) -> dict[str, Any]:
    """Return settings of a model: it is called with a batch as keywords; outputs of ``layers`` and head are kept."""
    hooks = {"input": [], "output": [*map(_path, layers), "classifier"]}
    return {"forward_proc": "forward_batch_only_as_kwargs", "forward_hook": hooks}


def _path(layer: int) -> str:
    return f"bert.encoder.layer.{layer - 1}"
