"""Time the host's work for an update without kernel launches: a batch, its weights, the teacher's cached outputs.

    python -m benchmarks.host --length 70 --updates 300        RTE's mean length; 12 layers of 768, 32 examples

No model runs. The result is the examples per second that the host can pass to a model.
"""

import argparse
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.features import FeatureRequest
from distill_runner.training.config import Optim
from distill_runner.training.data import TextData, batches_with_shares, epoch_updates
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets

LAYERS, WIDTH, EXAMPLES = 12, 768, 2490


def write_data(folder: Path, length: int) -> None:
    """Write texts with a mean length of ``length`` tokens, and random outputs of a teacher."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(4, length / 4, EXAMPLES).astype(np.int64), 4, 512)
    np.save(folder / "ids.npy", rng.integers(5, 30000, lengths.sum()).astype(np.int32))
    np.save(folder / "segments.npy", np.zeros(lengths.sum(), dtype=np.int8))
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
    np.save(folder / "labels.npy", rng.integers(0, 2, EXAMPLES))
    targets = folder / "targets"
    targets.mkdir()
    np.save(targets / "logits.npy", rng.standard_normal((EXAMPLES, 2), dtype=np.float32))
    np.save(targets / "cls.npy", rng.standard_normal((EXAMPLES, LAYERS, WIDTH), dtype=np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=70)
    parser.add_argument("--updates", type=int, default=300)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, options.length)
        device = Device.from_name("cpu", "fp32")
        needs = FeatureRequest(logits=True, cls=frozenset(range(1, LAYERS + 1)))
        targets = CachedTargets(folder / "targets", device, needs)
        data, optim = TextData(TokenSplit(folder), device), Optim(lr=1e-4, batch_size=32, epochs=1)
        updates = (update for epoch in range(10**6) for update in epoch_updates(data, optim, 0, epoch))
        for count in (20, options.updates):  # the first updates read the files
            started, num_examples = time.perf_counter(), 0
            for update in islice(updates, count):
                num_examples += update.num_examples
                for batch in batches_with_shares(update):
                    targets(batch)
        print(f"{num_examples / (time.perf_counter() - started):,.0f} examples per second")


if __name__ == "__main__":
    main()
