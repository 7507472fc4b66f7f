"""Runs that are killed, at random and at chosen moments, or meet a full disk or flipped bytes: the end is the same."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_runner.pipeline.store import MANIFEST, is_complete
from faults import forked
from faults.forked import LONG, KilledAt, Limited, exit_in_training

pytestmark = pytest.mark.faults
KILLS, KILLS_OF_SWEEPS, FLIPS = (30, 4, 60) if LONG else (2, 0, 2)
"""Of each seed; with those at chosen moments 200 and more."""


@pytest.fixture(scope="module")
def command(tiny_task_folder: Path, tiny_bert_folder: Path) -> tuple[str, ...]:
    """A teacher, its targets and a student, of seconds, saved at every second step."""
    data = ("task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]")
    sizes = ("task.max_length=48", "student.num_layers=2", "optim.batch_size=16", "optim.epochs=2")
    teacher = ("teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.optim.epochs=2", "teacher.optim.lr=3e-3")
    return (
        *data,
        *sizes,
        *teacher,
        "method=alp",
        "runtime.device=cpu",
        "runtime.checkpoint_steps=2",
        "runtime.threads=1",
    )


@pytest.fixture(scope="module")
def undisturbed(command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run without a fault, and the CPU seconds that it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    forked.run(folder, ("--help",))  # starts the server
    process = forked.start(folder, command)
    seconds = forked.cpu_seconds(process, float("inf"))
    ended = forked.finish(process, folder)
    assert ended.code == 0, ended.text
    return folder, seconds


def outcome(folder: Path) -> dict[str, Any]:
    """What must be the same however a run came to its end: scores and weights."""
    (file,) = folder.glob("outputs/runs/*/result.json")
    result = json.loads(file.read_text())
    weights = (file.parent / "model" / "model.safetensors").read_bytes()
    return {key: result[key] for key in ("key", "metrics", "history", "teacher_score", "steps")} | {"weights": weights}


def half_trusted(folder: Path) -> list[Path]:
    """Artifacts under their own name that are not what their manifest says."""
    found = (path for path in folder.glob("outputs/store/*/*/") if "." not in path.name)
    return [path for path in found if not is_complete(path, checksums=True)]


def bring_to_an_end(folder: Path, command: tuple[str, ...], undisturbed: Path, tally: Counter[str]) -> None:
    """The same command, and the same outcome."""
    assert half_trusted(folder) == []
    ended = forked.run(folder, command)
    assert ended.code == 0, ended.text
    assert "Traceback" not in ended.text
    same = outcome(folder) == outcome(undisturbed)
    tally["lost or changed"] += not same
    assert same


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
def test_kills_at_random(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], seed: int
) -> None:
    """Again and again until a run gets through; then all over."""
    rng, done = random.Random(seed), 0
    whole, seconds = undisturbed
    while done < KILLS:
        folder = tmp_path / str(done)
        folder.mkdir()
        while done < KILLS:
            process = forked.start(folder, command)
            forked.cpu_seconds(process, rng.uniform(0.3, 1.0) * seconds)
            if process.exitcode is not None:
                assert process.exitcode == 0, (folder / "said.txt").read_text()
                break
            forked.kill(process)
            done += 1
            tally["kills"] += 1
            assert half_trusted(folder) == []
        bring_to_an_end(folder, command, whole, tally)
        shutil.rmtree(folder)


STORE, CHECKPOINTS, STATUS = (
    "distill_runner.pipeline.store",
    "distill_runner.training.checkpoints",
    "distill_runner.pipeline.status",
)
MOMENTS = [
    *(KilledAt(STORE, "_write_manifest", when, call) for when in ("before", "behind") for call in (1, 3, 4, 5)),
    *(KilledAt("pathlib", "Path.rename", when, call) for when in ("before", "behind") for call in (1, 3, 4, 5)),
    *(KilledAt("torch", "save", "half", call) for call in (1, 3, 6)),
    *(KilledAt("pathlib", "Path.replace", when, call) for when in ("before", "behind") for call in (1, 4, 9)),
    *(KilledAt("distill_runner.running", "copy_tree", when, 1) for when in ("before", "behind")),
    *(KilledAt(STATUS, "write_json", when, call) for when in ("before", "behind") for call in (1, 2)),
]


@pytest.mark.parametrize("moment", MOMENTS if LONG else MOMENTS[::9], ids=str)
def test_a_kill_at_a_chosen_moment(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], moment: KilledAt
) -> None:
    ended = forked.run(tmp_path, command, moment)
    if ended.code == 0:
        pytest.skip("the run has no such moment")
    assert ended.code == -signal.SIGKILL, ended.text
    tally["kills"] += 1
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


def test_bytes_that_flip_are_found(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str]
) -> None:
    """In any file of the store: one bit, a cut, nothing left, another JSON."""
    rng = random.Random(1)
    whole, _ = undisturbed
    for _ in range(FLIPS):
        folder = tmp_path / "copy"
        shutil.copytree(whole / "outputs/store", folder / "outputs/store")
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix not in (".lock", ".use")]
        file = rng.choice(files)
        content = bytearray(file.read_bytes())
        damage = rng.choice(["flip", "cut", "empty", "other"])
        if damage == "flip" and content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif damage == "cut":
            content = content[: len(content) // 2]
        else:
            content = bytearray(b"[1, 2]" if damage == "other" else b"")
        file.write_bytes(content)
        tally["flips"] += 1
        ended = forked.run(folder, command)
        assert ended.code == 0, (file, damage, ended.text)
        found, expected = outcome(folder), outcome(whole)
        if found["teacher_score"] is None:  # the student is whole, and its teacher is not built for its score alone
            del found["teacher_score"], expected["teacher_score"]
        tally["lost or changed"] += found != expected
        assert found == expected, (file, damage)
        shutil.rmtree(folder)


@pytest.mark.parametrize("content", ["[]", "5", "null", '"a"', "{}", '{"a": 1}', '{"spec.json": []}', '[{"size": 1}]'])
def test_a_manifest_of_another_shape_is_no_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "spec.json").write_text("{}")
    (tmp_path / MANIFEST).write_text(content)
    assert not is_complete(tmp_path)


@pytest.mark.parametrize("num_bytes", [1000, 20_000, 100_000, 400_000] if LONG else [20_000])
def test_a_full_disk_is_said_in_two_lines(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], num_bytes: int
) -> None:
    ended = forked.run(tmp_path, command, Limited("RLIMIT_FSIZE", num_bytes))
    if ended.code == 0:
        pytest.skip("no file is that large")
    tally["full disks"] += 1
    assert ended.code == 1, ended.text
    assert "Traceback" not in ended.text, ended.text
    assert "there is no space left on the disk" in ended.text
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


@pytest.fixture(
    params=[("size", 300_000), ("size", 800_000), ("nr_inodes", 12)] if LONG else [("size", 300_000)], ids=str
)
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in memory, with so many bytes or files."""
    place = tmp_path / "disk"
    place.mkdir()
    what, number = request.param
    mount = ["mount", "-t", "tmpfs", "-o", f"{what}={number}", "none", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here: that takes root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_of_its_own_that_is_full(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], small_disk: Path
) -> None:
    """The store and the run folder on it; with room again the same command goes on."""
    (tmp_path / "outputs").symlink_to(small_disk)
    ended = forked.run(tmp_path, command)
    tally["full disks"] += 1
    assert ended.code == 1, ended.text
    assert "Traceback" not in ended.text, ended.text
    assert "no space left on the disk, or a quota" in ended.text or "of the disk are free" in ended.text
    subprocess.run(["mount", "-o", "remount,size=100m,nr_inodes=10000", str(small_disk)], check=True)
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heeded(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], number: int
) -> None:
    process = forked.start(tmp_path, command)
    said = tmp_path / "said.txt"
    forked.wait_until(lambda: said.exists() and "stage student: building" in said.read_text())
    forked.kill(process, number)
    ended = forked.finish(process, tmp_path)
    tally["signals"] += 1
    assert ended.code in (0, 130), ended.text
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


@pytest.mark.parametrize("call", range(1, 6) if LONG else [3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_between_two_stages_is_one_line(
    command: tuple[str, ...],
    undisturbed: tuple[Path, float],
    tmp_path: Path,
    tally: Counter[str],
    call: int,
    number: signal.Signals,
) -> None:
    """Right after an artifact is complete: tokens, the teacher, its outputs, the student."""
    ended = forked.run(tmp_path, command, KilledAt("pathlib", "Path.rename", "behind", call, number))
    tally["signals"] += 1
    assert ended.code == 130, ended.text
    assert ended.text.splitlines()[-1] == "interrupted: repeat the command to resume"
    assert "Traceback" not in ended.text
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


@pytest.mark.parametrize("limit", [12, 16, 20, 24, 28, 32, 40, 64] if LONG else [24])
def test_too_many_open_files_are_two_lines(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str], limit: int
) -> None:
    ended = forked.run(tmp_path, command, Limited("RLIMIT_NOFILE", limit))
    tally["few files"] += 1
    if ended.code:
        assert ended.code == 1, ended.text
        assert "Traceback" not in ended.text, ended.text
        assert f"too many are open (the limit is {limit})" in ended.text
    assert not list(tmp_path.glob("outputs/store/*/*.damaged-*"))
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


def test_a_run_that_ends_itself_has_failed(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str]
) -> None:
    ended = forked.run(tmp_path, command, exit_in_training)
    tally["exits"] += 1
    assert ended.code == 1, ended.text
    assert "something called exit(0) before the run finished" in ended.text
    (file,) = tmp_path.glob("outputs/runs/*/status.json")
    assert json.loads(file.read_text())["status"] == "failed"
    bring_to_an_end(tmp_path, command, undisturbed[0], tally)


def test_equal_processes_train_once(
    command: tuple[str, ...], undisturbed: tuple[Path, float], tmp_path: Path, tally: Counter[str]
) -> None:
    """Several at once: one trains, the others wait, and all end well."""
    folders = [tmp_path / str(number) for number in range(4 if LONG else 3)]
    for folder in folders:
        folder.mkdir()
    shared = (*command, f"store.dir={tmp_path / 'store'}", f"hydra.run.dir={tmp_path / 'run'}")
    processes = [forked.start(folder, shared) for folder in folders]
    ended = [forked.finish(process, folder) for process, folder in zip(processes, folders, strict=True)]
    tally["equal processes"] += len(folders)
    assert [end.code for end in ended] == [0] * len(folders), [end.text for end in ended]
    assert sum(end.text.count("stage teacher: building") for end in ended) == 1


@pytest.mark.skipif(not LONG, reason="takes minutes: make faults")
def test_equal_sweeps_all_end_with_the_table(command: tuple[str, ...], tmp_path: Path, tally: Counter[str]) -> None:
    script = [sys.executable, "-m", "distill_runner", "-m", *command, "seed=1,2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    sweeps = [subprocess.Popen(script, cwd=tmp_path, env=forked.environment(), **pipes) for _ in range(4)]
    said = [sweep.communicate(timeout=1500) for sweep in sweeps]
    tally["equal sweeps"] += len(sweeps)
    assert [sweep.returncode for sweep in sweeps] == [0] * 4, said
    assert len({out for out, _ in said}) == 1, said


@pytest.mark.skipif(not LONG, reason="takes minutes: make faults")
def test_orphans_end_soon(command: tuple[str, ...], tmp_path: Path, tally: Counter[str]) -> None:
    """The main process of a sweep is killed alone: its points are gone before the next one would wait for them."""
    long = [*(argument for argument in command if argument != "optim.epochs=2"), "optim.epochs=400"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    script = [sys.executable, "-m", "distill_runner", "-m", *long, *launcher, "seed=1,2"]
    sweep = subprocess.Popen(script, cwd=tmp_path, env=forked.environment(), start_new_session=True)
    try:
        forked.wait_until(lambda: len(list(tmp_path.glob("outputs/runs/*/metrics.jsonl"))) >= 2)
        sweep.kill()
        sweep.wait()
        tally["orphans"] += 1
        seconds = forked.wait_until(lambda: not _group(sweep.pid), 120)
        print(f"orphans were gone after {seconds:.0f} s")
    finally:
        if _group(sweep.pid):
            os.killpg(sweep.pid, signal.SIGKILL)


@pytest.mark.skipif(not LONG, reason="takes minutes: make faults")
def test_a_sweep_that_is_killed_ends_with_the_same_table(
    command: tuple[str, ...], tmp_path: Path, tally: Counter[str]
) -> None:
    """With all its workers and points, at random moments."""
    script = [sys.executable, "-m", "distill_runner", "-m", *command, "seed=1,2"]
    script += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    rng, folder, whole = random.Random(2), tmp_path / "killed", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()

    def started(place: Path) -> subprocess.Popen[bytes]:
        with (place / "said.txt").open("wb") as said:
            options: dict[str, Any] = {"stdout": said, "stderr": said, "start_new_session": True}
            return subprocess.Popen(script, cwd=place, env=forked.environment(), **options)

    def check() -> None:
        same = scores(folder) == scores(whole)
        tally["lost or changed"] += not same
        assert same

    begin = time.monotonic()
    assert started(whole).wait(3 * forked.PATIENCE) == 0
    seconds = time.monotonic() - begin
    for _ in range(KILLS_OF_SWEEPS):
        sweep = started(folder)
        try:
            assert sweep.wait(rng.uniform(0.3, 1.0) * seconds) == 0, (folder / "said.txt").read_text()
            check()
            shutil.rmtree(folder / "outputs")
        except subprocess.TimeoutExpired:
            os.killpg(sweep.pid, signal.SIGKILL)
            sweep.wait()
            forked.wait_until(lambda sweep=sweep: not _group(sweep.pid))  # type: ignore[misc]
            tally["kills"] += 1
            assert half_trusted(folder) == []
    assert started(folder).wait(3 * forked.PATIENCE) == 0, (folder / "said.txt").read_text()
    check()


def scores(folder: Path) -> list[Any]:
    """What the table of a sweep is made of."""
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("outputs/runs/*/result.json"))]
    return [(result["key"], result["seed"], result["metrics"], result["history"]) for result in results]


def _group(number: int) -> list[int]:
    """Processes of a session that are there and no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == number and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
