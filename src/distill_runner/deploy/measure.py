"""What the forms of a model (torch, ONNX, ONNX in 8 bits) give and cost: outputs, score, size, latency, throughput."""

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.common.errors import UserError, quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.deploy.onnx import FOLDER, PLAIN, Inputs, OnnxEngine, TorchEngine, export, quantize
from distill_runner.report.statistics import CONFIDENCE

if TYPE_CHECKING:
    from distill_runner.datasets.splits import Split
    from distill_runner.tasks import Task

Engine = Callable[[Inputs], np.ndarray]
PERCENTILES = (50, 95, 99)
WARM_UP, BATCH, ROUNDS = 10, 32, 6
SHARES = (0.05, 0.35, 0.65, 0.95)
EXACT, TOLERANCE = "ONNX", 1e-3
"""The form in float32, and its largest allowed difference to torch's outputs, relative to max(1, largest output)."""
HEADING = "## Deployment"


class PaddedSplit:
    """Examples of a split as padded batches, for engines.

    Args:
        split: the tokenized examples.
        tokenizer: their tokenizer, which knows the names of the model's inputs and the padding token.
    """

    def __init__(self, split: "Split", tokenizer: Any) -> None:
        self.split, self.names, self.padding = (split, tokenizer.model_input_names, tokenizer.pad_token_id or 0)

    def __len__(self) -> int:
        return len(self.split)

    def inputs(self, index: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples with the numbers ``index``, shortest first, padded to the longest of them."""
        return self._padded(self.split.batch(index))

    def _padded(self, batch: Any) -> dict[str, np.ndarray]:
        ids, segments, mask = batch.to_padded()
        ids = ids.masked_fill(mask == 0, self.padding)
        arrays = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        return {name: arrays[name].numpy() for name in self.names if name in arrays}

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the indices of all examples, shortest first, in batches of 32."""
        order = np.argsort(self.split.lengths, kind="stable")
        yield from (order[start : start + BATCH] for start in range(0, len(order), BATCH))

    def outputs(self, engine: Engine) -> np.ndarray:
        """Return the outputs of ``engine`` for all examples, (``split.num_outputs``, C), in the order of the split."""
        import torch

        outputs = np.zeros((self.split.num_outputs, 0), dtype=np.float32)
        for index in self.batches():
            batch = self.split.batch(index)
            logits = torch.from_numpy(engine(self._padded(batch)))
            if batch.head_tokens is not None:  # a head on tokens
                logits = batch.from_padded(logits)[batch.head_tokens]
            if not outputs.size:
                outputs = np.zeros((len(outputs), logits.shape[-1]), dtype=np.float32)
            outputs[batch.output_index] = logits.numpy()
        return outputs

    def samples(self) -> np.ndarray:
        """Return the indices of four examples that range from short to long."""
        positions = [int(share * (len(self) - 1)) for share in SHARES]
        return np.argsort(self.split.lengths, kind="stable")[positions]


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
    from scipy.special import bdtr

    ordered = sorted(values)
    skipped = 0
    while 2 * (skipped + 1) < len(ordered) and 2 * bdtr(skipped + 1, len(ordered), 0.5) <= 1 - CONFIDENCE:
        skipped += 1
    return ordered[skipped], ordered[-1 - skipped]


class Stopwatch:
    """Times engines on the same randomly drawn examples, in rounds; tokenization is not timed.

    In each round the engines take turns, example by example, so that a change in the machine's load affects all of
    them. A round has a part of the examples, of all lengths, and a batch of 32.

    Args:
        engines: engine by name. They are warmed up here.
        examples: examples for each engine, by the engine's name; each model has its own tokenizer.
        num_examples: number of examples to draw; all examples if there are fewer.
    """

    def __init__(self, engines: Mapping[str, Engine], examples: Mapping[str, PaddedSplit], num_examples: int) -> None:
        self.engines, self.examples = engines, examples
        first, self.generator = next(iter(examples.values())), np.random.default_rng(0)
        numbers = self.generator.choice(len(first), min(num_examples, len(first)), replace=False)
        self.numbers = numbers[np.argsort(first.split.lengths[numbers], kind="stable")]
        self.singles: dict[str, list[list[float]]] = {name: [] for name in engines}
        self.batches: dict[str, list[float]] = {name: [] for name in engines}
        self.batch_size = min(BATCH, len(self.numbers))
        for name, engine in engines.items():
            for size in (*[1] * WARM_UP, self.batch_size):
                engine(examples[name].inputs(self.numbers[-size:]))

    def measure(self, rounds: int = ROUNDS) -> "dict[str, RunningCost]":
        """Time more rounds, and return the costs over all rounds so far."""
        for number in range(rounds):
            part = self.generator.permutation(self.numbers[number::rounds])
            for times in self.singles.values():
                times.append([])
            for example in part:
                for name in self.engines:
                    self.singles[name][-1].append(self._seconds(name, [int(example)]))
            batch = self.generator.choice(self.numbers, self.batch_size, replace=False)
            for name in self.engines:
                self.batches[name].append(self._seconds(name, batch))
        return {name: self._cost(name) for name in self.engines}

    def _seconds(self, name: str, numbers: Sequence[int] | np.ndarray) -> float:
        inputs = self.examples[name].inputs(numbers)
        start = time.perf_counter()
        self.engines[name](inputs)
        return time.perf_counter() - start

    def _cost(self, name: str) -> RunningCost:
        rounds = [part for part in self.singles[name] if part]
        low, high = median_interval([1000 * float(np.median(part)) for part in rounds])
        batches = self.batches[name]
        per_second = len(batches) * self.batch_size / sum(batches)
        return RunningCost(_percentiles(np.concatenate(rounds)), per_second, (low, high), _percentiles(batches))


def _percentiles(seconds: "Sequence[float] | np.ndarray") -> dict[int, float]:
    return {p: 1000 * float(np.percentile(seconds, p)) for p in PERCENTILES}


def conditions(threads: int, cpus: Sequence[int] = ()) -> str:
    """Return the processor, the threads, the CPUs that they are pinned to, if any, and the load of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else "")
    name = names[0] if names else platform.processor() or platform.machine()
    pinned = f" pinned to CPU {', '.join(map(str, cpus))}" if cpus else ""
    load = f"; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs" if hasattr(os, "getloadavg") else ""
    return f"{name}, {quantity(threads, 'thread')}{pinned}{load}"


def checked_difference(outputs: np.ndarray, reference: np.ndarray, model: str) -> float:
    """Return the largest difference between the outputs of ONNX in float32 and those of torch.

    Raises:
        UserError: it is too large.
    """
    difference = float(np.abs(outputs - reference).max())
    if difference > TOLERANCE * max(1.0, float(np.abs(reference).max())):
        problem = f"ONNX of the {model} gives outputs that differ from torch's by up to {difference:.1e}"
        raise UserError("distill-run export", None, problem, "Do not deploy it; please report this.")
    return difference


@dataclass(frozen=True)
class ModelForm:
    """Score, size and running cost of one model in one form.

    Attributes:
        model: ``student`` or ``teacher``.
        form: ``torch``, ``ONNX`` or ``ONNX int8``.
        score: the task's first metric on the first validation split.
        num_bytes: size of the file, or of the parameters for torch.
        cost: latency and throughput.
        difference: largest absolute difference between the outputs of this form and of torch; None for torch itself.
        agreement: ``Task.agreement`` with torch, such as the fraction of equal predictions; None for torch itself.
        num_params: number of parameters of the model.
    """

    model: str
    form: str
    score: float
    num_bytes: int
    cost: RunningCost
    difference: float | None = None
    agreement: float | None = None
    num_params: int = 0


class Evaluation:
    """Evaluates models, in several forms each, on one split of a task.

    Args:
        task: the task of the models.
        split: the split, as for ``Task.examples``.
        threads: number of CPU threads of each engine.
        folder: an existing folder, in which the split is saved as each model reads it.
    """

    def __init__(self, task: "Task", split: str, threads: int, folder: Path) -> None:
        self.task, self.threads, self.folder, self.examples = (task, threads, folder, task.examples(split))
        self.scored: dict[str, Split] = {}
        self.splits: dict[str, PaddedSplit] = {}
        self.engines: dict[tuple[str, str], Any] = {}
        self.num_params: dict[str, int] = {}

    def add(self, name: str, model: Path, target: Path, int8: bool) -> None:
        """Add a model: in torch, in ONNX and, if ``int8``, in ONNX with 8 bits.

        Args:
            name: ``student`` or ``teacher``.
            model: folder of the model.
            target: folder in which the ONNX files get a subfolder.
            int8: whether to add the form in 8 bits.
        """
        from distill_runner.models.build import count_parameters, load_model
        from distill_runner.models.sources import resolve_source

        tokenizer, folder = resolve_source(str(model)).tokenizer(), self.folder / name
        folder.mkdir()
        self.task.write(folder, self.examples, tokenizer)
        scored = self.scored[name] = self.task.open(folder)
        split = self.splits[name] = PaddedSplit(scored.teacher_inputs, tokenizer)
        network = load_model(model, self.task.head)
        self.num_params[name] = count_parameters(network)
        path = export(network, split.inputs(split.samples()), target / FOLDER / PLAIN)
        self.engines[name, "torch"] = TorchEngine(network)
        self.engines[name, "ONNX"] = OnnxEngine(path, self.threads)
        if int8:
            self.engines[name, "ONNX int8"] = OnnxEngine(quantize(path), self.threads)

    def rows(self, num_examples: int) -> list[ModelForm]:
        """Return a row for each form of each model.

        Args:
            num_examples: number of examples that are timed.
        Raises:
            UserError: ONNX in float32 gives other outputs than torch.
        """
        outputs = {(model, form): self.splits[model].outputs(engine) for (model, form), engine in self.engines.items()}
        engines = {" ".join(key): engine for key, engine in self.engines.items()}
        examples = {" ".join(key): self.splits[key[0]] for key in self.engines}
        costs, rows = Stopwatch(engines, examples, num_examples).measure(), []
        for (model, form), form_outputs in outputs.items():
            reference = outputs[model, "torch"]
            difference = float(np.abs(form_outputs - reference).max())
            if form == EXACT:
                checked_difference(form_outputs, reference, model)
            agreement = self.task.agreement(form_outputs, reference, self.scored[model])
            to_torch = (None, None) if form == "torch" else (difference, agreement)
            score = self.task.score(form_outputs, self.scored[model])[self.task.metrics[0]]
            num_bytes, cost = (self.engines[model, form].num_bytes, costs[f"{model} {form}"])
            rows.append(
                ModelForm(model, form, score, num_bytes, cost, to_torch[0], to_torch[1], self.num_params[model])
            )
        return rows


def table(rows: Sequence[ModelForm], metric: str, agreement: str = "same prediction") -> str:
    """Return a Markdown table with one line per row; ``agreement`` names what the forms agree in."""
    header = [
        "model",
        "form",
        f"{metric} ×100",
        "parameters",
        "MB",
        *(f"p{p} ms" for p in PERCENTILES),
        f"examples/s at {BATCH}",
    ]
    cells = [
        [
            row.model,
            row.form,
            f"{100 * row.score:.2f}",
            f"{row.num_params / 1e6:.2f}M",
            f"{row.num_bytes / 1e6:.1f}",
            *(f"{row.cost.milliseconds[p]:.2f}" for p in PERCENTILES),
            f"{row.cost.examples_per_second:.1f}",
            "" if row.difference is None else f"{row.difference:.1e}",
            "" if row.agreement is None else f"{100 * row.agreement:.2f} %",
        ]
        for row in rows
    ]
    return markdown_table([*header, "largest difference", agreement], cells, text_columns=2)


def section(
    rows: Sequence[ModelForm], metric: str, conditions: str, loading: str, agreement: str = "same prediction"
) -> str:
    """Return the section on deployment for a model card, as Markdown; ``loading`` is a code block."""
    return f"{HEADING}\n\n{table(rows, metric, agreement)}\n\n{conditions}\n\n{loading}\n"


def as_json(rows: Sequence[ModelForm], conditions: str) -> dict[str, Any]:
    return {"conditions": conditions, "rows": [asdict(row) for row in rows]}


def with_section(card: str, text: str) -> str:
    """Return ``card`` with the section ``text``, in place of an earlier section on deployment or at the end.

    The earlier section ends with its code block (``section``). Text after that block stays.
    """
    start, _, end = card.partition(f"\n{HEADING}\n")
    return start.rstrip("\n") + f"\n\n{text}" + end.partition("\n```\n")[2]
