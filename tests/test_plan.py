"""``plan=true``: how seconds are measured, kept, and shown on a busy machine."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.sweeping import plan
from distill_runner.training.config import Runtime
from helpers.small_runs import Compose


@dataclass
class Clock:
    """Clocks of a machine on which a process gets one of ``share`` parts of a CPU."""

    share: float
    cpu: float = 0.0

    def call(self, seconds: float) -> None:
        self.cpu += seconds

    def thread_time(self) -> float:
        return self.cpu

    def perf_counter(self) -> float:
        self.cpu += 1e-6  # so that a loop that waits for a time ends
        return self.cpu / self.share


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(share=1.0)
    monkeypatch.setattr(plan, "time", clock)
    return clock


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_other_processes_do_not_change_the_estimate(share: float, clock: Clock) -> None:
    """A plan once said 148 hours for one, since it was made beside a running sweep."""
    clock.share = share
    seconds = plan._mean_seconds(clock.call, [0.01, 0.03], torch.device("cpu"))
    assert seconds == pytest.approx(0.02, rel=1e-3)


def test_one_slow_call_does_not_count(clock: Clock) -> None:
    """The kernel of a new shape is compiled at its first call, or a page of memory is fetched from disk."""
    durations = iter([1.0, 0.01, 0.7, 0.01, 0.01, 0.01, 0.01])
    assert plan._mean_seconds(lambda _: clock.call(next(durations)), [None], torch.device("cpu")) == pytest.approx(0.01)


def test_a_measurement_ends_in_time(clock: Clock) -> None:
    """An update of a large model takes a minute: nobody plans for half an hour."""
    assert plan._mean_seconds(clock.call, [60.0, 80.0, 100.0], torch.device("cpu")) == pytest.approx(60)
    assert clock.cpu == pytest.approx(120)  # a warm-up and one call


@pytest.mark.parametrize(
    ("share", "seconds", "text"),
    [(1.0, 600, ""), (0.5, 600, " on a free machine, about 20 min with the 50% of a CPU"), (0.5, 0, "")],
)
def test_a_busy_machine_is_named(share: float, seconds: float, text: str, clock: Clock, tmp_path: Path) -> None:
    clock.share = share
    pipeline = Pipeline(Store(tmp_path), Runtime(device="cpu"))
    shown = plan._now(seconds, pipeline)
    assert shown.startswith(text)
    assert bool(shown) == bool(text)


def test_a_second_plan_measures_nothing(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of ten students takes as long as training one, and is repeated at each change of the grid."""
    measured: list[Stage] = []

    def measure(_self: object, stage: Stage) -> plan._Speed:
        measured.append(stage)
        return plan._Speed(0.25, 0.5, 1000)

    monkeypatch.setattr(plan.Estimator, "_measure", measure)
    run = compose("method=rkd", f"store.dir={tmp_path}")
    stage = resolve(run.stages, "student", "fp32")

    def speed() -> plan._Speed:
        return plan.Estimator(Pipeline(Store(tmp_path), run.runtime))._speed(stage)

    assert speed() == speed() == plan._Speed(0.25, 0.5, 1000)
    assert len(measured) == 1
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    speed()
    assert len(measured) == 2
