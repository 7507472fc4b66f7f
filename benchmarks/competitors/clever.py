"""Training loop that an experienced engineer writes in an evening, with ``transformers`` alone.

The teacher's outputs are cached in memory, batches hold texts of similar lengths and are padded to their longest text,
and AdamW is fused. ``sort=False`` keeps the batches of the other competitors, so that losses can be compared.
"""

from typing import Any

import torch

from benchmarks.competitors import Train
from benchmarks.competitors.naive import inputs_and_labels, optimizer_of
from benchmarks.loss import layer_distance, logits_of, loss_of
from benchmarks.setting import Setting
from distill_runner.training.config import Precision
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets


def make(
    setting: Setting, dtype: torch.dtype = torch.float32, precision: Precision = "fp32", sort: bool = True
) -> Train:
    device = Device.from_name(setting.device, precision)
    batches = setting.batches(sort)
    targets: CachedTargets | LiveTargets = setting.targets(device)
    if dtype != torch.float32:  # the cache holds float32 only
        targets = setting.live_targets(device, dtype)
    inputs = setting.padded(None, batches)
    features = [targets(batch) for batch in batches]
    layers = setting.layers

    def train(student: Any, steps: int) -> list[float]:
        device.place(student).train()
        optimizer, curve = optimizer_of(student, fused=True), []
        for batch, teacher in zip(inputs[:steps], features[:steps], strict=True):
            arguments, labels = inputs_and_labels(device, batch)
            with device.autocast():
                output = student(**arguments, output_hidden_states=True)
            cls = [state[:, 0].to(dtype) for state in output.hidden_states]
            distances = [
                layer_distance(cls[j], [teacher.cls[k].to(dtype) for k in entry]) for j, entry in layers.items()
            ]
            mask = arguments["attention_mask"]
            logits = logits_of(output, mask).to(dtype)
            loss = loss_of(logits, setting.padded_logits(teacher.logits, mask).to(dtype), labels, distances)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    return train
