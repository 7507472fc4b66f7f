"""CPUs that a process may use: fewer than the machine has, under ``taskset``, in a container, or beside processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distill_runner.common import library_switches
from distill_runner.common.process import available_cpus

COUNT = """
import sys
from pathlib import Path
from distill_runner.common.process import available_cpus
for quota in sys.argv[1:]:
    Path("/sys/fs/cgroup/cpu.max").write_text(quota + "\\n")
    print(available_cpus())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of processes")
def test_affinity_counts() -> None:
    """``taskset -c 0`` on a machine of 64 CPUs would start 64 workers on one of them."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert available_cpus() <= len(allowed)


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    """A container of 4 CPUs on a host of 64 would run 64 threads, which wait for each other."""
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /sys/fs/cgroup && exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*inside, str(tmp_path), "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a folder in a namespace of his own")
    quotas = {"100000 100000": 1, "150000 100000": 2, "max 100000": None}
    command = [*inside, str(tmp_path), sys.executable, "-c", COUNT, *quotas]
    counts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert [int(count) for count in counts] == [
        min(one or available_cpus(), available_cpus()) for one in quotas.values()
    ]


@pytest.mark.parametrize(
    ("threads", "processes", "torch_threads", "cpus", "expected"),
    [(None, 1, 64, 4, 4), (None, 1, 2, 4, 2), (None, 3, 64, 7, 2), (None, 4, 2, 2, 1), (5, 2, 64, 4, 5)],
)
def test_threads_of_a_run(
    threads: int | None, processes: int, torch_threads: int, cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``OMP_NUM_THREADS`` and ``runtime.threads`` are kept; processes of a machine share what is left of the quota."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr("torch.get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(library_switches, "available_cpus", lambda: cpus)
    taken = list[int]()
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    library_switches.limit_threads(threads)
    assert taken == [expected]


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_spin_briefly(
    own: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads on a busy machine took three times as long as one; who sets a policy has it."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    library_switches.set_early_switches()
    assert (os.environ.get("GOMP_SPINCOUNT"), os.environ["HF_DEACTIVATE_ASYNC_LOAD"]) == (expected, "1")
