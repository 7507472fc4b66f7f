"""The loop as a first script would have it: the teacher runs at every step, everything is padded to the maximum."""

from typing import Any

import torch

from benchmarks.competitors import Train
from benchmarks.loss import layer_distance, loss_of
from benchmarks.setting import LR, WEIGHT_DECAY, Setting
from distill_runner.config import Precision
from distill_runner.devices import Device


def make(setting: Setting, dtype: torch.dtype = torch.float32, precision: Precision = "fp32") -> Train:
    device = Device.of(setting.device, precision)
    teacher = device.place(setting.teacher().to(dtype))
    batches, layers = setting.padded(setting.task.max_length), setting.layers

    def loss_on(student: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs: Any = {name: part.to(device.torch) for name, part in batch.items()}
        labels = inputs.pop("labels")
        with device.autocast():
            with torch.no_grad():
                taught = teacher(**inputs, output_hidden_states=True)
            mine = student(**inputs, output_hidden_states=True)
        learnt, wanted = ([state[:, 0].to(dtype) for state in side.hidden_states] for side in (mine, taught))
        distances = [layer_distance(learnt[j], [wanted[k] for k in entry]) for j, entry in layers.items()]
        return loss_of(mine.logits.to(dtype), taught.logits.to(dtype), labels, distances)

    def train(student: Any, steps: int) -> list[float]:
        device.place(student).train()
        optimizer, curve = optimizer_of(student), []
        for batch in batches[:steps]:
            loss = loss_on(student, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    return train


def optimizer_of(student: Any) -> torch.optim.Optimizer:
    """AdamW as a first script has it; no weight decay on biases and LayerNorm."""
    matrices = [p for p in student.parameters() if p.ndim > 1]
    vectors = [p for p in student.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR)
