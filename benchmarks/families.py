"""Compare packed with padded batches in three model families: forward and backward pass, measured in turns.

    python -m benchmarks.families [--family modernbert] [--batch 32] [--rounds 10]

Models have random weights, 6 layers of width 256 and 4 heads. Sequence lengths vary from a quarter of the length to the
full length. The padded side is the model's own forward pass. It prints the medians of processor time on one thread, and
their ratio.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks.attention_kl import batch_of
from distill_runner.datasets.batches import Batch
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.padded import extract_padded

NEEDS = FeatureRequest(logits=True)
COMMON = {"vocab_size": 1000, "num_labels": 2, "pad_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "distilbert": {"n_layers": 6, "dim": 256, "n_heads": 4, "hidden_dim": 1024},
    "modernbert": {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384},
}
ENDS = {"modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--length", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("family      length  padded ms  packed ms  ratio", flush=True)
    for family in options.family:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **COMMON | SIZES[family] | ENDS.get(family, {}))
        model = AutoModelForSequenceClassification.from_config(config).eval()  # no dropout: both sides do the same
        for length in options.length:
            batch = batch_of(length, options.batch)
            times: dict[str, list[float]] = {"padded": [], "packed": []}
            for number in range(options.rounds + 1):
                for name, forward in (("padded", extract_padded), ("packed", extract)):
                    seconds = _update(model, batch, forward)
                    if number:
                        times[name].append(seconds)
            padded, packed = (1000 * statistics.median(times[name]) for name in ("padded", "packed"))
            print(f"{family:11} {length:6} {padded:10.1f} {packed:10.1f} {padded / packed:6.2f}", flush=True)


def _update(model: Any, batch: Batch, forward: Any) -> float:
    model.zero_grad()
    started = time.process_time()
    logits = forward(model, batch, NEEDS).logits
    logits.sin().sum().backward()
    return time.process_time() - started


if __name__ == "__main__":
    main()
