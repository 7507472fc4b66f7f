"""What the forms of a model (torch, ONNX, ONNX in 8 bits) give and cost: outputs, score, size, latency, throughput."""

import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import bdtr, ndtri

from distill_runner.common.errors import UserError, quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.metrics import f1_of_counts
from distill_runner.datasets.splits import Split
from distill_runner.deploy.folder import tokenizer_of
from distill_runner.deploy.onnx import FOLDER, PLAIN, Inputs, OnnxEngine, TorchEngine, export, quantize
from distill_runner.models.build import count_parameters, load_model
from distill_runner.models.config import Head
from distill_runner.models.padded import reads_padding
from distill_runner.report.compare import Predictions, pair_predictions
from distill_runner.report.resampling import ExampleTest, SummedScores
from distill_runner.report.statistics import ALPHA, CONFIDENCE, POWER
from distill_runner.tasks import Task

log = logging.getLogger(__name__)
Engine = Callable[[Inputs], np.ndarray]
PERCENTILES = (50, 95, 99)
WARM_UP, BATCH, ROUNDS = 10, 32, 6
SHARES = (0.05, 0.35, 0.65, 0.95)
TORCH, EXACT, INT8 = "torch", "ONNX", "ONNX int8"
"""Forms of a model; in 8 bits, the ranges of activations are those of each run."""
TOLERANCE = 1e-4
"""Largest allowed difference between outputs of ONNX in float32 and of torch, relative to max(1, largest output)."""


class PaddedSplit:
    """Examples of a split as padded batches, for engines.

    Args:
        split: the tokenized examples.
        tokenizer: of texts; it knows the names of the model's inputs and the padding token.
    """

    def __init__(self, split: Split, tokenizer: Any) -> None:
        self.split, self.tokenizer = split, tokenizer
        self.order = np.argsort(split.lengths, kind="stable")

    def __len__(self) -> int:
        return len(self.split)

    def inputs(self, index: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples with the numbers ``index``, shortest first, texts padded to the longest of them."""
        batch: Any = self.split.batch(index)
        if self.tokenizer is None:
            return {"pixel_values": batch.pixel_values.contiguous().numpy()}
        ids, segments, mask = batch.to_padded()
        ids = ids.masked_fill(mask == 0, self.tokenizer.pad_token_id or 0)
        arrays = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        return {name: arrays[name].numpy() for name in self.tokenizer.model_input_names if name in arrays}

    def outputs(self, engine: Engine, batch_size: int = BATCH) -> np.ndarray:
        """Return the outputs of ``engine`` for all examples, (``split.num_outputs``, C), in the order of the split.

        Args:
            batch_size: 1 for int8, which rounds an example by the values of the others in its batch, and for models
                that read padding.
        """
        outputs = np.zeros((self.split.num_outputs, 0), dtype=np.float32)
        for start in range(0, len(self), batch_size):
            index = self.order[start : start + batch_size]
            batch = self.split.batch(index)
            logits = torch.from_numpy(engine(self.inputs(index)))
            if batch.head_tokens is not None:  # a head on tokens
                logits = batch.from_padded(logits)[batch.head_tokens]
            if not outputs.size:
                outputs = np.zeros((len(outputs), logits.shape[-1]), dtype=np.float32)
            outputs[batch.output_index] = logits.numpy()
        return outputs

    def samples(self) -> dict[str, np.ndarray]:
        """Return four examples that range from short to long, as one batch."""
        return self.inputs(self.order[[int(share * (len(self) - 1)) for share in SHARES]])


@dataclass(frozen=True)
class RunningCost:
    """Running cost of one engine.

    Attributes:
        milliseconds: latency of a single example, by percentile (50, 95, 99).
        examples_per_second: throughput in batches of 32.
        interval: bounds of an interval of at least 95% of ``milliseconds[50]``, over rounds (``median_interval``).
        batch_milliseconds: latency of a batch of 32, by percentile.
    """

    milliseconds: dict[int, float]
    examples_per_second: float
    interval: tuple[float, float] = (0.0, inf)
    batch_milliseconds: dict[int, float] = field(default_factory=dict)

    def is_as_fast_as(self, other: "RunningCost") -> bool:
        """Whether the intervals of the medians overlap: these measurements do not say which engine is faster."""
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval of the median of independent values by their order, of at least 95% if there are six or more.

    It assumes no distribution: the median lies below all n values with probability 1 / 2^n, and so on.
    """
    ordered, count = sorted(values), len(values)
    skipped = int((2 * bdtr(np.arange(1, (count + 1) // 2), count, 0.5) <= 1 - CONFIDENCE).sum())
    return ordered[skipped], ordered[-1 - skipped]


def running_costs(
    engines: Mapping[str, Engine], examples: Mapping[str, PaddedSplit], num_examples: int
) -> dict[str, RunningCost]:
    """Time engines, given by name, on the same randomly drawn examples, in rounds; tokenization is not timed.

    The engines are warmed up first. In each round they take turns, example by example, so that a change in the
    machine's load affects all of them. A round has a part of the examples, of all lengths, and a batch of 32.

    Args:
        examples: examples for each engine, by the engine's name; each model has its own tokenizer.
        num_examples: number of examples to draw; all examples if there are fewer.
    """
    first, generator = next(iter(examples.values())), np.random.default_rng(0)
    sample = generator.choice(len(first), min(num_examples, len(first)), replace=False)
    numbers = sample[np.argsort(first.split.lengths[sample], kind="stable")]
    batch_size = min(BATCH, len(numbers))

    def seconds(name: str, index: Sequence[int] | np.ndarray) -> float:
        inputs = examples[name].inputs(index)
        start = time.perf_counter()
        engines[name](inputs)
        return time.perf_counter() - start

    def percentiles(times: Sequence[float] | np.ndarray) -> dict[int, float]:
        return {p: 1000 * float(np.percentile(times, p)) for p in PERCENTILES}

    for name in engines:
        for size in (*[1] * WARM_UP, batch_size):
            seconds(name, numbers[-size:])
    rounds: dict[str, list[list[float]]] = {name: [] for name in engines}
    batches: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(min(ROUNDS, len(numbers))):
        for times in rounds.values():
            times.append([])
        for example in generator.permutation(numbers[number::ROUNDS]):
            for name in engines:
                rounds[name][-1].append(seconds(name, [int(example)]))
        batch = generator.choice(numbers, batch_size, replace=False)
        for name in engines:
            batches[name].append(seconds(name, batch))
    return {
        name: RunningCost(
            percentiles(np.concatenate(rounds[name])),
            len(batches[name]) * batch_size / sum(batches[name]),
            median_interval([1000 * float(np.median(times)) for times in rounds[name]]),
            percentiles(batches[name]),
        )
        for name in engines
    }


def conditions(threads: int, cpus: Sequence[int] = ()) -> dict[str, Any]:
    """Return the processor, the threads, the CPUs that they are pinned to, if any, and the load of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else "")
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    machine = {"processor": names[0] if names else platform.processor() or platform.machine(), "threads": threads}
    return machine | {"pinned": [*cpus], "load": load, "cpus": os.cpu_count() or 1}


def in_words(machine: Mapping[str, Any]) -> str:
    """Return ``conditions`` as a text, which says if the machine was busy."""
    pinned = f" pinned to CPU {', '.join(map(str, machine['pinned']))}" if machine["pinned"] else ""
    text = f"{machine['processor']}, {quantity(machine['threads'], 'thread')}{pinned}"
    if machine["load"] is None:
        return text
    text += f"; load {machine['load']:.1f} on {quantity(machine['cpus'], 'CPU')}"
    is_busy = machine["load"] > machine["cpus"]
    return f"{text}: the machine was busy, so the times compare these rows at best" if is_busy else text


def checked_difference(outputs: np.ndarray, reference: np.ndarray, model: str, tolerance: float = TOLERANCE) -> float:
    """Return the largest difference between the outputs of ONNX and those of torch.

    Raises:
        UserError: relative to max(1, largest output), it is above ``tolerance``.
    """
    difference = float(np.abs(outputs - reference).max())
    if difference > tolerance * max(1.0, float(np.abs(reference).max())):
        problem = f"ONNX of the {model} gives outputs that differ from torch's by up to {difference:.1e}"
        raise UserError("distill-run export", None, problem, "Do not deploy it; please report this.")
    return difference


class LabelScores(NamedTuple):
    """F1 of torch and of another form on a label; without a test if their predictions are equal."""

    torch: float
    form: float
    test: ExampleTest | None


@dataclass(frozen=True)
class ModelForm:
    """Score, size and running cost of one model in one form.

    Attributes:
        model: ``student``, ``teacher`` or ``model``.
        form: ``torch``, ``ONNX`` or ``ONNX int8``.
        score: the task's first metric on the first validation split.
        num_bytes: size of the file, or of the parameters for torch.
        num_params: number of parameters of the model.
        difference: largest absolute difference between the outputs of this form and of torch; None for torch itself.
        agreement: ``Task.agreement`` with torch, such as the fraction of equal predictions; None for torch itself.
        test: of the score against that of torch; None for torch itself, or if it cannot be tested.
        p: of the score being worse than torch's by the margin or more; None without a margin or a test.
        labels: scores by label.
        cost: latency and throughput.
    """

    model: str
    form: str
    score: float
    num_bytes: int
    num_params: int
    difference: float | None = None
    agreement: float | None = None
    test: ExampleTest | None = None
    p: float | None = None
    labels: Mapping[str, LabelScores] = field(default_factory=dict)
    cost: RunningCost = RunningCost({}, 0.0)

    @property
    def is_within(self) -> bool:
        """Whether it is shown that the score is not worse than torch's by the margin; float32 has torch's outputs."""
        return self.form == EXACT or (self.p is not None and self.p <= ALPHA)


def evaluate(
    models: Mapping[str, tuple[Path, Path]],
    task: Task,
    head: Head,
    threads: int,
    num_timed: int,
    int8: bool,
    margin: float | None,
) -> tuple[list[ModelForm], dict[str, Any]]:
    """Write models as ONNX, and return a row for each in torch, in ONNX and, if asked for, in ONNX with 8 bits.

    Args:
        models: by name, the folder of a model, and the folder in which its ONNX files get a subfolder.
        task: the task of the models; its first validation split is read.
        head: the head of the models.
        threads: number of CPU threads of each engine.
        num_timed: number of examples that are timed; all if there are fewer.
        int8: whether the models are measured in ONNX with 8 bits, too.
        margin: in points, by which ONNX may be worse than torch; None does not test it.
    Returns:
        The rows; and the machine with its load, the numbers of examples and the tokens of the timed ones.
    Raises:
        UserError: a model cannot be exported, or ONNX in float32 gives other outputs than torch.
    """
    examples = task.examples(next(iter(task.validation.values())))
    engines, splits, rows = dict[str, Any](), dict[str, PaddedSplit](), list[ModelForm]()
    with TemporaryDirectory() as scratch:
        for name, (model, target) in models.items():
            tokenizer = tokenizer_of(model, task)
            folder = Path(scratch) / name
            folder.mkdir()
            task.write(folder, examples, tokenizer)
            scored = task.open(folder)
            inputs = scored.teacher_inputs if task.tokenized else scored  # images without augmentation
            split, network = PaddedSplit(inputs, tokenizer), load_model(model, head)
            log.info("%s: exporting to ONNX", name)
            path = export(network, split.samples(), target / FOLDER / PLAIN)
            forms: dict[str, Any] = {TORCH: TorchEngine(network), EXACT: OnnxEngine(path, threads)}
            if int8:
                forms[INT8] = OnnxEngine(quantize(path), threads)
            reference, num_params = np.zeros(0), count_parameters(network)
            for form, engine in forms.items():
                log.info("%s: scoring %s on %s", name, form, quantity(len(split), "example", ","))
                engines[f"{name} {form}"], splits[f"{name} {form}"] = engine, split
                outputs = split.outputs(engine, 1 if form == INT8 or reads_padding(network) else BATCH)
                to_torch = dict[str, Any]()
                if form == TORCH:
                    reference = outputs
                else:
                    difference = checked_difference(outputs, reference, name, TOLERANCE if form == EXACT else inf)
                    to_torch = {"difference": difference, "agreement": task.agreement(outputs, reference, scored)}
                    to_torch |= _tests(task, folder, scored, outputs, reference, margin)
                score = task.score(outputs, scored)[task.metrics[0]]
                rows.append(ModelForm(name, form, score, engine.num_bytes, num_params, **to_torch))
        log.info("timing %d models in turns, on %d examples", len(engines), min(num_timed, len(split)))
        machine = conditions(threads)  # with the load of other work, not of the timing
        costs = running_costs(engines, splits, num_timed)
        lengths = split.split.lengths
        machine |= {"examples": len(lengths), "timed": min(num_timed, len(lengths))}
        if task.tokenized:
            machine |= {"tokens": {"median": float(np.median(lengths)), "largest": int(lengths.max())}}
    return [replace(row, cost=costs[f"{row.model} {row.form}"]) for row in rows], machine


def _tests(
    task: Task, folder: Path, split: Any, outputs: np.ndarray, reference: np.ndarray, margin: float | None
) -> dict[str, Any]:
    """Return the tests of a form against torch, as fields of ``ModelForm``."""
    metric, predictions, labels = task.metrics[0], list[Predictions](), dict[str, Any]()
    for values in (outputs, reference):
        task.save_predictions(folder / "predictions.npz", values, split)
        predictions.append(Predictions.read(folder / "predictions.npz", metric))
    own, of_torch = (task.label_counts(values, split) for values in (outputs, reference))
    for name, counts in own.items():
        scores = SummedScores([counts], [of_torch[name]], f1_of_counts)
        form, torch = scores.observed.tolist()
        labels[name] = LabelScores(torch, form, scores.test() if scores.is_different.any() else None)
    if (paired := pair_predictions(metric, predictions[:1], predictions[1:])) is None:
        return {"labels": labels}
    return {"labels": labels, "test": paired.test(), "p": None if margin is None else paired.p_not_worse(margin / 100)}


def examples_needed(p: float, examples: int, level: float = ALPHA) -> int | None:
    """Return about how many examples would show that a score is not worse, with a power of 80%; None if none would.

    Args:
        p: of the test on ``examples`` examples.
        level: of the test.
    """
    if not 0 < p < 0.5:
        return None
    return int(examples * ((-ndtri(level) + ndtri(POWER)) / -ndtri(p)) ** 2) + 1


def table(rows: Sequence[ModelForm], metric: str, agreement: str = "same prediction") -> str:
    """Return a Markdown table with one line per row; ``agreement`` names what the forms agree in."""
    header = ["model", "form", f"{metric} ×100", "to torch", "95%", "parameters", "MB"]
    header += [*(f"p{p} ms" for p in PERCENTILES), f"examples/s at {BATCH}", "largest difference", agreement]
    cells = [
        [
            row.model,
            row.form,
            f"{100 * row.score:.2f}",
            *_difference(row.test),
            f"{row.num_params / 1e6:.2f}M",
            f"{row.num_bytes / 1e6:.1f}",
            *(f"{row.cost.milliseconds[p]:.2f}" for p in PERCENTILES),
            f"{row.cost.examples_per_second:.1f}",
            "" if row.difference is None else f"{row.difference:.1e}",
            "" if row.agreement is None else f"{100 * row.agreement:.2f} %",
        ]
        for row in rows
    ]
    return markdown_table(header, cells, text_columns=2)


def label_table(row: ModelForm) -> str:
    """Return a Markdown table of F1 by label, of torch and of a form, with the difference and its 95% interval."""
    cells = [
        [name, f"{100 * torch:.2f}", f"{100 * form:.2f}", *_difference(test)]
        for name, (torch, form, test) in row.labels.items()
    ]
    return markdown_table(["label", "F1 ×100 of torch", f"of {row.form}", "difference", "95%"], cells)


def _difference(test: ExampleTest | None) -> list[str]:
    """Return a difference and its interval as cells; without an interval if too few examples differ."""
    if test is None:
        return ["", ""]
    bounds = [f"{100 * bound:+.2f}" for bound in test.interval or ()]
    return [f"{100 * test.difference:+.2f}", " to ".join(bounds) or f"{test.differing} differ"]
