"""What disturbs a measurement of time: other work on the machine, a quota of CPU time, and heat."""

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_runner.common.errors import quantity

WAITING = 0.02
"""Share of the time that a thread may wait for a CPU before a measurement counts as disturbed."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.stat")
HEAT = "devices/system/cpu/cpu*/thermal_throttle/*_throttle_count"


@dataclass(frozen=True)
class MachineState:
    """Counters of the machine at some time; those that the system does not have are 0.

    Attributes:
        seconds: the time.
        waited: seconds that this thread was ready to run while other work had its CPU.
        quota, heat: how often a quota of CPU time, or heat, slowed the CPUs.
    """

    seconds: float
    waited: float
    quota: int
    heat: int

    @classmethod
    def read(cls) -> "MachineState":
        waited = _numbers(Path("/proc/thread-self/schedstat"), r"^\d+ (\d+)")
        heat = [number for file in Path("/sys").glob(HEAT) for number in _numbers(file, r"(\d+)")]
        return cls(time.perf_counter(), sum(waited) / 1e9, sum(_numbers(CPU_QUOTA, r"nr_throttled (\d+)")), sum(heat))

    def disturbances(self, end: "MachineState") -> list[str]:
        """Return what disturbed the time between this state and ``end``, in words."""
        share = (end.waited - self.waited) / max(end.seconds - self.seconds, 1e-9)
        texts = [f"the timing thread waited {100 * share:.0f} % of the time for its CPU"] if share > WAITING else []
        texts += ["a quota of CPU time stopped the process"] if end.quota > self.quota else []
        return texts + (["heat slowed the CPUs"] if end.heat > self.heat else [])


def _numbers(file: Path, pattern: str) -> list[int]:
    try:
        return [int(number) for number in re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)]
    except OSError:
        return []


def conditions(threads: int, cpus: Sequence[int], load: float | None, disturbances: Sequence[str]) -> str:
    """Return the processor, the threads and what disturbed a measurement, as sentences.

    Args:
        cpus: to which the threads are pinned; empty if they are not.
        load: of the machine before the measurement.
    """
    names = re.findall(r"model name\s*:\s*(.*)", _text(Path("/proc/cpuinfo")))
    name = names[0] if names else platform.processor() or platform.machine()
    pinned = f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"
    text = f"{name}, {quantity(threads, 'thread')} {pinned}"
    text += "" if load is None else f"; load {load:.1f} on {os.cpu_count()} CPUs"
    return f"{text}. The machine was busy: {'; '.join(disturbances)}." if disturbances else f"{text}."


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
