"""Outputs and running costs (latency, throughput) of several engines on the same examples."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Inputs = Mapping[str, np.ndarray]
Engine = Callable[[Inputs], np.ndarray]
PERCENTILES = (50, 95, 99)
WARM_UP, BATCH = 10, 32
SHARES = (0.05, 0.35, 0.65, 0.95)


@dataclass(frozen=True)
class RunningCost:
    """Running cost of one engine.

    Attributes:
        milliseconds: latency of a single example, by percentile (50, 95, 99).
        examples_per_second: throughput in batches of 32.
    """

    milliseconds: dict[int, float]
    examples_per_second: float


class PaddedTexts:
    """Examples that are tokenised on demand; a batch is padded to its longest example.

    Args:
        texts: one list of N strings per text column.
        max_length: number of tokens to which longer examples are truncated.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[Sequence[str]], max_length: int) -> None:
        self.tokenizer, self.texts, self.max_length = tokenizer, texts, max_length
        self.lengths = np.array([sum(map(len, row)) for row in zip(*texts, strict=True)])

    def __len__(self) -> int:
        return len(self.texts[0])

    def inputs(self, index: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        columns = [[column[i] for i in index] for column in self.texts]
        how = {"truncation": True, "max_length": self.max_length, "padding": True, "return_tensors": "np"}
        return {name: np.asarray(values, dtype=np.int64) for name, values in self.tokenizer(*columns, **how).items()}

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the indices of all examples, sorted by number of characters, in batches of 32."""
        order = np.argsort(self.lengths, kind="stable")
        yield from (order[start : start + BATCH] for start in range(0, len(order), BATCH))

    def outputs(self, engine: Engine) -> np.ndarray:
        """Return the outputs of ``engine`` for all examples, (N, C), in the order of the examples."""
        parts = [(index, engine(self.inputs(index))) for index in self.batches()]
        outputs = np.zeros((len(self), parts[0][1].shape[1]), dtype=np.float32)
        for index, values in parts:
            outputs[index] = values
        return outputs

    def spread(self) -> np.ndarray:
        """Return the indices of four examples that range from short to long (in characters)."""
        places = [int(share * (len(self) - 1)) for share in SHARES]
        return np.argsort(self.lengths, kind="stable")[places]


def running_costs(
    engines: Mapping[str, Engine], texts: Mapping[str, PaddedTexts], num_examples: int
) -> dict[str, RunningCost]:
    """Time every engine on the same randomly drawn examples; tokenisation is not timed.

    The engines take turns, so that a change in the machine's load affects all of them.

    Args:
        engines: engine by name.
        texts: examples for each engine, by the engine's name; each engine has its own tokenizer.
        num_examples: number of examples to draw; all examples if there are fewer.
    """
    count = len(next(iter(texts.values())))
    drawn = np.random.default_rng(0).choice(count, min(num_examples, count), replace=False)
    parts = [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]
    single = {name: [texts[name].inputs([int(i)]) for i in drawn] for name in engines}
    batches = {name: [texts[name].inputs(part) for part in parts] for name in engines}
    alone: dict[str, list[float]] = {name: [] for name in engines}
    together: dict[str, float] = dict.fromkeys(engines, 0.0)
    for name, engine in engines.items():
        for inputs in (*single[name][:WARM_UP], batches[name][0]):
            engine(inputs)
    for number in range(len(drawn)):
        for name, engine in engines.items():
            alone[name].append(_seconds(engine, single[name][number]))
    for number in range(len(parts)):
        for name, engine in engines.items():
            together[name] += _seconds(engine, batches[name][number])
    latencies = {name: {p: 1000 * float(np.percentile(alone[name], p)) for p in PERCENTILES} for name in engines}
    return {name: RunningCost(latencies[name], len(drawn) / together[name]) for name in engines}


def _seconds(engine: Engine, inputs: Inputs) -> float:
    started = time.perf_counter()
    engine(inputs)
    return time.perf_counter() - started
