"""The Ray launcher on two nodes of this machine, one of which is killed in the middle."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from hydra_plugins.distill_runner_ray import launcher

Start = Callable[..., "Node"]
SECONDS = 900.0
"""After which something hangs; without other programs it takes two minutes."""


@pytest.fixture
def made() -> launcher.RayLauncher:
    return launcher.RayLauncher(address="nobody:1", num_cpus=1, num_gpus=0, max_retries=1)


def test_a_ray_that_is_not_installed_is_told(made: launcher.RayLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'distill-run\[ray\]'"):
        made.setup(hydra_context=None, task_function=None, config=None)  # type: ignore[arg-type]


def test_a_cluster_that_is_not_there_is_told(made: launcher.RayLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made.address = f"127.0.0.1:{free.getsockname()[1]}"  # nobody listens
        with pytest.raises(UserError, match=r"hydra\.launcher\.address=.*refused"):
            made.launch([], 0)


class FakeRay:
    """A cluster as far as it is asked: it runs what it is given, and loses tasks whose overrides name it."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    nodes: Any = staticmethod(lambda: [{}, {}])
    put: Any = staticmethod(lambda value: value)

    def remote(self, **_options: Any) -> Callable[..., Any]:
        return lambda function: SimpleNamespace(remote=lambda shared, number, job: (number, job[0]))

    def wait(self, tasks: list[Any]) -> tuple[list[Any], list[Any]]:
        return tasks[:1], tasks[1:]

    def get(self, task: tuple[int, str]) -> tuple[int, str]:
        if task[1] == "lost":
            raise RuntimeError("the node died\nand more")
        return task


def test_points_that_are_given_up_are_told(made: launcher.RayLauncher, caplog: pytest.LogCaptureFixture) -> None:
    vars(made).update(_cluster=FakeRay(), hydra_context=None, config=None, task_function=None)
    caplog.set_level("INFO")
    assert list[Any](made.launch([["well"], ["lost"]], 3)) == [(3, "well")]
    assert caplog.messages == [
        "2 tasks for Ray on 2 nodes",
        "1 of 2 tasks have ended",
        "2 of 2 tasks have ended",
        "a point was given up: the node died",
    ]


class Node:
    """A node of a Ray cluster: one CPU, all of its processes children of this one."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *options]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        with (folder / "ray.log").open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """As if its machine had lost power: no process of it gets to say a word."""
        for number in [self.process.pid, *below(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()


def below(number: int) -> list[int]:
    """Processes that another has started, and those that they have."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(number)], capture_output=True, text=True).stdout
    return [one for child in map(int, found.split()) for one in (child, *below(child))]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token of this user's would be asked for by the first node alone
    nodes: list[Node] = []

    def started(*options: str) -> Node:
        nodes.append(Node(tmp_path, *options))
        return nodes[-1]

    yield started
    for node in reversed(nodes):
        node.kill()


def command(parent: Path, tiny_task: Path, tiny_bert: Path, name: str, *more: str) -> list[str]:
    folder = parent / name
    return [
        *(sys.executable, "-m", "distill_runner", "-m", "task=custom", f"task.dataset={tiny_task}"),
        *("task.columns=[sentence1,sentence2]", "task.max_length=48", "teacher=base", f"teacher.source={tiny_bert}"),
        *("teacher.optim.epochs=1", "student.num_layers=2", "optim.batch_size=16", "optim.epochs=12", "method=rkd"),
        *("optim.lr=1e-3,3e-3", "runtime.device=cpu", "runtime.threads=1", "runtime.checkpoint_steps=10"),
        *(f"hydra.sweep.dir={folder}/runs", f"store.dir={folder}/store", *more),
    ]


def wait_for(found: Callable[[], Any], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return value


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_a_sweep_outlives_a_node(start: Start, tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    start("--head", f"--port={port}", "--include-dashboard=false")
    wait_for(lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text())
    (address,) = set(re.findall(r"--address='(.*?)'", (tmp_path / "ray.log").read_text()))
    second = start(f"--address={address}")
    grid = partial(command, tmp_path, tiny_task_folder, tiny_bert_folder)
    ray = ["hydra/launcher=ray", f"hydra.launcher.address={address}"]
    going = subprocess.Popen(grid("on_nodes", *ray), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    alone = subprocess.Popen(grid("undisturbed"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    log = wait_for(lambda: half_trained(second, tmp_path / "on_nodes"))
    second.kill()
    out, _ = going.communicate(timeout=SECONDS)
    assert going.returncode == 0, out
    assert log.read_text().count("resuming after step") == 1
    expected, _ = alone.communicate(timeout=SECONDS)
    assert models(tmp_path / "on_nodes") == models(tmp_path / "undisturbed")
    assert table(out) == table(expected)


def half_trained(node: Node, folder: Path) -> Path | None:
    """The log of a point that the node is at, once it has saved."""
    links = [link for number in below(node.process.pid) for link in Path(f"/proc/{number}/fd").glob("*")]
    opened = {os.path.realpath(link) for link in links}
    logs = [log for log in folder.glob("runs/*-rkd-*/distill-run.log") if str(log.resolve()) in opened]
    return next((log for log in logs if "epoch 2 " in log.read_text()), None)


def models(folder: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.glob("store/**/model.safetensors")}
    assert len(found) == 3  # the teacher's, too
    return found


def table(out: str) -> list[str]:
    return out[out.index("teacher custom") : out.index("Best points of the grids")].splitlines()
