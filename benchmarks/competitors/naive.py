"""Training loop of a first script: the teacher runs at every step, and all texts are padded to the maximum length.

``make_teacher`` and ``make_evaluation`` are the other parts of such a script: training the teacher, and evaluation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.competitors import Train
from benchmarks.loss import INPUTS, labels_of, layer_distance, logits_of, loss_of
from benchmarks.setting import LR, WEIGHT_DECAY, Setting
from distill_runner.training.config import Precision
from distill_runner.training.devices import Device


def make(setting: Setting, dtype: torch.dtype = torch.float32, precision: Precision = "fp32") -> Train:
    device = Device.from_name(setting.device, precision)
    teacher = device.place(setting.teacher().to(dtype))
    layers = setting.layers

    def loss_of_both(student: Any, inputs: Any, labels: torch.Tensor) -> torch.Tensor:
        mask = inputs["attention_mask"]
        with device.autocast():
            with torch.no_grad():
                teacher_outputs = teacher(**inputs, output_hidden_states=True)
            outputs = student(**inputs, output_hidden_states=True)
        both = (outputs, teacher_outputs)
        cls, teacher_cls = ([state[:, 0].to(dtype) for state in output.hidden_states] for output in both)
        distances = [layer_distance(cls[j], [teacher_cls[k] for k in entry]) for j, entry in layers.items()]
        logits, teacher_logits = (logits_of(output, mask).to(dtype) for output in both)
        return loss_of(logits, teacher_logits, labels, distances)

    return _loop(setting, device, loss_of_both)


def make_teacher(setting: Setting) -> Train:
    """Return a function that trains the teacher on the labels. It does not use the student."""
    teacher = setting.teacher().requires_grad_(True)
    loop = _loop(
        setting,
        Device.from_name(setting.device, "fp32"),
        lambda model, inputs, labels: cross_entropy(logits_of(model(**inputs), inputs["attention_mask"]), labels),
    )
    return lambda _, steps: loop(teacher, steps)


def make_evaluation(setting: Setting) -> Train:
    """Return a function that runs the student on as many batches as there would be steps."""
    device, batches = Device.from_name(setting.device, "fp32"), setting.padded(setting.max_length)

    def evaluate(student: Any, steps: int) -> list[float]:
        device.place(student).eval()
        with torch.no_grad():
            inputs = (inputs_and_labels(device, batch)[0] for batch in batches[:steps])
            return [float(logits_of(student(**batch), batch["attention_mask"]).mean()) for batch in inputs]

    return evaluate


def _loop(setting: Setting, device: Device, loss_on: Callable[[Any, Any, torch.Tensor], torch.Tensor]) -> Train:
    batches = setting.padded(setting.max_length)

    def train(model: Any, steps: int) -> list[float]:
        device.place(model).train()
        optimizer, curve = optimizer_of(model), []
        for batch in batches[:steps]:
            loss = loss_on(model, *inputs_and_labels(device, batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    return train


def inputs_and_labels(device: Device, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Return inputs and labels on the device."""
    batch = {name: part.to(device.torch) for name, part in batch.items()}
    return {name: batch[name] for name in INPUTS}, labels_of(batch)


def optimizer_of(student: Any, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return AdamW as a first script uses it, without weight decay on biases and LayerNorm."""
    matrices = [p for p in student.parameters() if p.ndim > 1]
    vectors = [p for p in student.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, fused=fused)
