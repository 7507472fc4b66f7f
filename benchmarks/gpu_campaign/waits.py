"""Whether the host waits for the GPU, and whether copies race with the updates: part ``waits`` of the campaign.

A BERT of 4 layers without dropout is trained with batches that are copied to the GPU before all updates, and once more
with batches that are copied in turn. The losses must be equal to the bit: a copy that is read too early would change
them.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.training.config import Precision
from distill_runner.training.devices import Device

WARMUP = 2
"""Updates that are not timed."""
NEEDS = FeatureRequest(logits=True, cls=frozenset({2, 4}))


def batches(count: int) -> list[Batch]:
    """Return batches of 32 texts of 10 to 127 tokens, on the host."""
    generator = np.random.default_rng(0)
    sample = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(count):
            folder = Path(name)
            lengths = generator.integers(10, 128, 32)
            np.save(folder / "ids.npy", generator.integers(5, 30000, lengths.sum()).astype(np.int32))
            np.save(folder / "segments.npy", np.zeros(lengths.sum(), np.int8))
            np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
            sample.append(TokenSplit(folder).batch(np.arange(32), None))
    return sample


def train(device: Device, host: list[Batch], width: int, ahead: bool) -> tuple[torch.Tensor, float, float]:
    """Train, and return the losses, and milliseconds of an update: of the host alone, and until the GPU is done."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": width // 16, "intermediate_size": 4 * width}
    config = BertConfig(num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    torch.manual_seed(0)
    model = device.place(BertForSequenceClassification(config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, start = list[torch.Tensor](), 0.0
    items: Iterable[Batch] = (device.move(batch) for batch in host)
    if ahead:
        items = [*items]
        torch.cuda.synchronize()
    for number, batch in enumerate(items):
        if number == WARMUP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with device.autocast():
            features = extract(model, batch, NEEDS)
        assert features.logits is not None
        loss = features.logits.float().square().mean()
        loss = loss + sum(states.float().square().mean() for states in features.cls.values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    by_host = time.perf_counter() - start
    torch.cuda.synchronize()
    timed = len(host) - WARMUP
    return torch.stack(losses).cpu(), by_host / timed * 1e3, (time.perf_counter() - start) / timed * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    host, is_gpu = batches(options.updates), torch.version.cuda is not None
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16") if is_gpu else ("fp32", "bf16")
    for precision in precisions:
        device = Device.from_name("cuda", precision)
        (ahead, *times), (in_turn, *others) = (train(device, host, options.width, way) for way in (True, False))
        assert torch.equal(ahead, in_turn), f"{precision}: a copy was read too early: {ahead - in_turn}"
        texts = [
            f"{way} {by_host:.2f} / {in_all:.2f}" for way, by_host, in_all in (("ahead", *times), ("in turn", *others))
        ]
        print(f"{precision}: ms of an update, of the host / in all: {', '.join(texts)}")
    if is_gpu:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            train(device, host, options.width, False)
            torch.cuda.set_sync_debug_mode("default")
        print(f"waits in {options.updates} updates: {len(caught)}")
        for line in sorted({f"  {warning.filename}:{warning.lineno}: {warning.message}"[:150] for warning in caught}):
            print(line)
    print("losses are equal to the bit")


if __name__ == "__main__":
    main()
