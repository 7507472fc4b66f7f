"""Run competitors in turns, A B A B, each in separate processes that wait while the others run.

Separate processes keep memory and thread counts separate. On a busy machine, one process for all of them spares the
time in which each imports torch and prepares its files. Loading, padding and the teacher's cached outputs are
prepared before the clock starts, and the first step is a warm-up.
"""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import harmonic_mean
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.competitors import Competitor, competitor
from benchmarks.competitors.distill_run import MEASURED
from benchmarks.machine import matmul_peak, peak_memory, student_operations, synchronize
from benchmarks.setting import BATCH, Setting
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers

FEWEST_ROUNDS = 3
Weights = dict[str, torch.Tensor]
WITHOUT_GRADIENT = "qa_outputs.bias"
"""Weight that is not compared.

It shifts all logits of a softmax equally. Its gradient is therefore rounding error, which Adam turns into steps.
"""


@dataclass
class Result:
    """Measurements of one competitor.

    Attributes:
        rates: examples per second, one number per round.
        cpu_rates: examples per CPU second of all its processes and threads, one number per round.
        peaks: operations per second of the fastest matrix product, one number per round: of one core on a CPU.
        memory: peak memory of its processes together, in MiB.
        curve: losses of all steps without dropout.
    """

    title: str
    rates: list[float] = field(default_factory=list)
    cpu_rates: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    memory: float = 0.0
    curve: list[float] = field(default_factory=list)

    def ratios(self, baseline: "Result") -> list[float]:
        """Return the rates relative to those of ``baseline``, round by round."""
        return [rate / base for rate, base in zip(self.rates, baseline.rates, strict=True)]

    def cpu_ratios(self, baseline: "Result") -> list[float]:
        """Return the rates by CPU seconds relative to those of ``baseline``, round by round."""
        return [rate / base for rate, base in zip(self.cpu_rates, baseline.cpu_rates, strict=True)]

    def share(self, setting: Setting, needed_only: bool) -> list[float]:
        """Return the share of the highest peak in each round; ``needed_only`` as in ``student_operations``.

        On a CPU, both speeds are those of a CPU second, so that other processes do not count.
        """
        needed_only = needed_only and not setting.reads_all
        operations = student_operations(setting.stage.shape, setting.lengths(), needed_only)
        rates = self.cpu_rates if setting.device == "cpu" else self.rates
        return [rate * operations / max(self.peaks) for rate in rates]


class Worker:
    """A competitor in its own process."""

    def __init__(self, setting: Setting, contender: Competitor, threads: int) -> None:
        quiet_transformers()
        torch.set_num_threads(threads)
        self.setting, self.contender, self.device = setting, contender, torch.device(setting.device)
        self.train = contender.make(setting)
        self.train(setting.student(), 1)

    def peak(self) -> float:
        """Return the operations per second of the fastest matrix product."""
        return matmul_peak(self.contender.dtype, self.device)

    def rates(self) -> tuple[float, float]:
        """Return the examples per second of wall clock and per CPU second of one training run.

        The beginning and the end of training do not count: a real training run has hundreds of times as many updates.
        """
        steps = self.setting.num_examples // BATCH
        (seconds, cpu_seconds), (other_seconds, other_cpu_seconds) = self._seconds(steps), self._seconds(0)
        examples = steps * BATCH * (MEASURED if self.records else 1) * self.contender.options.get("students", 1)
        return examples / (seconds - other_seconds), examples / (cpu_seconds - other_cpu_seconds)

    @property
    def records(self) -> bool:
        """Whether it records graphs, which takes longer than most of the few updates here."""
        options = self.contender.options
        return self.device.type == "cuda" and self.contender.module == "distill_run" and options.get("graphs", True)

    def _seconds(self, steps: int) -> tuple[float, float]:
        student, clocks = self.setting.student(), list[tuple[float, float]]()

        def read_clocks() -> None:
            synchronize(self.device)
            clocks.append((time.perf_counter(), time.process_time()))

        read_clocks()
        self.train(student, steps, *([read_clocks] if self.records else []))
        read_clocks()
        return clocks[-1][0] - clocks[-2][0], clocks[-1][1] - clocks[-2][1]

    def memory(self) -> float:
        """Return the peak memory of this process in MiB; memory of the GPU if it trains on one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / 2**20
        return peak_memory()

    def curve(self) -> list[float]:
        """Return the losses of all steps without dropout."""
        return trained(self.setting, self.contender)[0]


def trained(setting: Setting, contender: Competitor, dtype: torch.dtype | None = None) -> tuple[list[float], Weights]:
    """Train without dropout, in ``dtype`` (default: float32); return the losses of all steps and the final weights."""
    student: Any = setting.student().to(dtype or torch.float32)
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    train = contender.make(setting, **contender.compared, **({"dtype": dtype} if dtype else {}))
    curve = train(student, setting.num_examples // BATCH)
    return curve, {name: weights for name, weights in student.state_dict().items() if name != WITHOUT_GRADIENT}


_worker: Worker


def _open(*args: Any) -> None:
    global _worker
    _worker = Worker(*args)


def _call(method: str) -> Any:
    return getattr(_worker, method)()


class SameProcess:
    """A competitor in this process, of which it has one."""

    def __init__(self, _stack: ExitStack, *args: Any) -> None:
        setting, contender, workers, threads = args
        if workers > 1:
            raise UserError("--one-process", None, f"{contender.title} was asked for with {workers} processes")
        self.worker = Worker(setting, contender, threads)

    def all(self, method: str) -> list[Any]:
        return [self.first(method)]

    def first(self, method: str) -> Any:
        return getattr(self.worker, method)()


class Processes:
    """Processes of one competitor, which do the same work at the same time."""

    def __init__(self, stack: ExitStack, setting: Setting, contender: Competitor, workers: int, threads: int) -> None:
        # Executors, since a pool would wait for ever for a process that was killed for lack of memory.
        share = threads if workers == 1 else max(1, threads // workers)
        args = (1, multiprocessing.get_context("spawn"), _open, (setting, contender, share))
        self.executors = [stack.enter_context(ProcessPoolExecutor(*args)) for _ in range(workers)]

    def all(self, method: str) -> list[Any]:
        futures: list[Future[Any]] = [executor.submit(_call, method) for executor in self.executors]
        return [future.result() for future in futures]

    def first(self, method: str) -> Any:
        return self.executors[0].submit(_call, method).result()


def contest(
    setting: Setting,
    names: Sequence[str],
    threads: int,
    repeats: int,
    within: float = 0.0,
    one_process: bool = False,
) -> list[Result]:
    """Time all competitors in turns for ``repeats`` rounds, then measure their memory and their loss curves.

    Args:
        one_process: run all competitors in this process; their memory is then that of all.
        within: end after fewer rounds, but at least ``FEWEST_ROUNDS``, when the 95% interval of each ratio by CPU
            seconds is narrower than this part of the ratio on either side.
    """
    results = {name: Result(_title(name)) for name in names}
    with ExitStack() as stack:
        start: Any = SameProcess if one_process else Processes
        running = {name: start(stack, setting, *competitor(name), threads) for name in names}
        for processes in running.values():
            processes.all("memory")  # returns when the processes are ready
        for _ in range(repeats):
            for name, processes in running.items():
                results[name].peaks.append(processes.first("peak"))
                rates, cpu_rates = zip(*processes.all("rates"), strict=True)
                results[name].rates.append(sum(rates))
                results[name].cpu_rates.append(harmonic_mean(cpu_rates))
            if is_narrow([*results.values()], within):
                break
        for name, processes in running.items():
            results[name].memory = sum(processes.all("memory"))
            results[name].curve = processes.first("curve")
    return list(results.values())


def is_narrow(results: Sequence[Result], within: float) -> bool:
    """Return whether the intervals of all ratios to the first competitor, by CPU seconds, are narrow."""
    num_rounds = len(results[0].rates)
    if num_rounds < FEWEST_ROUNDS:
        return False
    logarithms = [np.log(result.cpu_ratios(results[0])) for result in results[1:]]
    factor = stats.t.ppf(0.975, num_rounds - 1) / np.sqrt(num_rounds)
    return all(factor * np.std(values, ddof=1) < within for values in logarithms)


def _title(name: str) -> str:
    contender, workers = competitor(name)
    return f"{contender.title}, {workers} processes" if workers > 1 else contender.title


def largest_weight_difference(first: Weights, second: Weights) -> float:
    """Return the largest absolute difference of a weight."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in second)


def largest_loss_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference of two loss curves, relative to the second curve."""
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))
