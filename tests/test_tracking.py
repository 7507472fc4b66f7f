"""Trackers: what is logged is read back from the files written, and no fault reaches the training."""

import contextlib
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.common.errors import TrainingPaused, UserError
from distill_runner.tracking import trackers as tracking
from distill_runner.tracking.trackers import Outcome, TrackerConfig, flatten, open_tracker, track_sweep

KEY = "0123456789" * 4


class Recorder:
    """A tracker that remembers its calls, and fails in all of them if told to."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fault = fault

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fault:
            raise self.fault

    def log(self, values: tracking.Values, *, step: int, epoch: float | None = None) -> None:
        self._call("log", dict(values), step, epoch)

    def record(self, outcome: Outcome) -> None:
        self._call("record", outcome)

    def finish(self, exit_code: int) -> None:
        self._call("finish", exit_code)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands in for W&B, whose package these tests do not need."""
    recorder = Recorder()
    monkeypatch.setitem(tracking.OPTIONAL, "wandb", lambda *_: recorder)
    return recorder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_written_without_any_tracker(tmp_path: Path) -> None:
    with open_tracker(TrackerConfig(), tmp_path, "run", {}, "distill") as tracker:
        tracker.log({"loss/ce": 0.25, "phase": "warm-up"}, step=1, epoch=0.5)
        assert len(lines(tmp_path)) == 1, "a line reaches the file at once"
        tracker.log({"loss/ce": np.float32(0.5), "count": np.int64(3), "nan": float("nan")}, step=2)
        tracker.record(Outcome({"score": 1.0}))
    assert lines(tmp_path) == [
        {"step": 1, "epoch": 0.5, "loss/ce": 0.25, "phase": "warm-up"},
        {"step": 2, "loss/ce": 0.5, "count": 3, "nan": None},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("left_behind", [b'{"step": 1}\n', b'{"step": 1}\n{"step": 2, "lo', b'{"st'])
def test_a_run_taken_up_again_appends_and_drops_a_torn_line(tmp_path: Path, left_behind: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(left_behind)
    with open_tracker(TrackerConfig(), tmp_path, "run", {}, "distill") as tracker:
        tracker.log({}, step=2)
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}][left_behind.count(b"\n") == 0 :]


def test_a_run_that_goes_on_at_a_checkpoint_logs_no_line_twice(tmp_path: Path) -> None:
    """What a killed process had logged after its last checkpoint is computed again."""
    for first in (1, 2):
        with open_tracker(TrackerConfig(), tmp_path, "run", {}, "distill") as tracker:
            for step in range(first, first + 3):
                tracker.log({"loss/kd": 0.5, "loss": 1.0}, step=step)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_full_disk_stops_neither_the_training_nor_leaves_half_a_line(tmp_path: Path) -> None:
    """A limit on the size of files cuts the third line short, as a full disk does."""
    code = f"""
        import resource
        from pathlib import Path
        from distill_runner.tracking.trackers import TrackerConfig, open_tracker
        with open_tracker(TrackerConfig(), Path({str(tmp_path)!r}), "run", {{}}, "distill") as tracker:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
            for step in range(5):
                tracker.log({{}}, step=step)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            tracker.log({{}}, step=5)
    """
    environment = os.environ | {"PYTHONPATH": str(Path(tracking.__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 5}]
    assert done.stderr.count("the run continues") == 1


def test_every_tracker_gets_plain_numbers(tmp_path: Path, recorder: Recorder) -> None:
    with open_tracker(TrackerConfig(name="wandb"), tmp_path, "run", {}, "distill") as tracker:
        tracker.log({"loss": np.float64(0.5)}, step=3, epoch=1.0)
        tracker.record(Outcome({"score": 0.5}, {"results": [{"a": 1}]}))
    assert recorder.calls == [
        ("log", {"loss": 0.5}, 3, 1.0),
        ("record", Outcome({"score": 0.5}, {"results": [{"a": 1}]})),
        ("finish", 0),
    ]
    assert type(recorder.calls[0][1]["loss"]) is float


@pytest.mark.parametrize(
    ("fault", "code"), [(RuntimeError("step 7"), 1), (KeyboardInterrupt(), 1), (TrainingPaused([]), 0)]
)
def test_an_exception_but_a_pause_finishes_with_1_and_passes(
    tmp_path: Path, recorder: Recorder, fault: BaseException, code: int
) -> None:
    config = TrackerConfig(name="wandb")
    with pytest.raises(type(fault)), open_tracker(config, tmp_path, "run", {}, "distill"):
        raise fault
    assert recorder.calls == [("finish", code)]


def test_a_fault_is_logged_once_and_the_file_goes_on(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fault = OSError("no space left\nand more")
    with open_tracker(TrackerConfig(name="wandb"), tmp_path, "run", {}, "distill") as tracker:
        for step in range(3):
            tracker.log({}, step=step)
        tracker.record(Outcome())
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert len(recorder.calls) == 5, "it is tried again each time"
    assert [record.message for record in caplog.records] == ["Recorder failed, the run continues: no space left"]


def test_one_level_of_names() -> None:
    nested = {"task": "rte", "weights": {"ce": 0.5, "kd": {"t": 2}}, "heads": None, "tags": ["a", "b"], "o.k": True}
    assert flatten(nested) == {"task": "rte", "weights/ce": 0.5, "weights/kd/t": 2, "tags": "a; b", "o/k": True}


SWEEP: list[dict[str, Any]] = [
    {"status": "done", "task": "rte", "method": "rkd", "teacher": "minilm_l6", "score": 0.5, "weights": {"kd": 0.2}},
    {"status": "done", "task": "rte", "method": "nkd", "teacher": None, "score": 0.25},
    {"status": "failed", "task": "mrpc", "method": "rkd", "error": "loss kd is nan"},
]


def test_a_sweep_is_a_run_in_the_group_of_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, opened = Recorder(), list[Any]()

    def opening(*arguments: Any) -> Recorder:
        opened.append(arguments)
        return recorder

    monkeypatch.setitem(tracking.OPTIONAL, "wandb", opening)
    config, pictures = TrackerConfig(name="wandb", tags=("mine",)), [tmp_path / "scores.png"]
    track_sweep(config, tmp_path, "alp_kd/table 1", SWEEP, "the table", pictures)
    ((config, folder, run_id, settings, job_type),) = opened
    assert (config.group, config.title, job_type) == ("alp_kd/table 1", "alp_kd/table 1", "sweep")
    assert config.tags == ("mine", "rte", "mrpc", "rkd", "nkd", "minilm_l6")
    assert (folder, run_id, settings) == (tmp_path, "sweep-alp_kd-table-1", {"sweep": "alp_kd/table 1"})
    (_, outcome), finish = recorder.calls
    rows = outcome.tables["points"]
    assert outcome.summary == {"count": 3, "count/done": 2, "count/failed": 1}
    assert (rows[0]["weights/kd"], rows[1].get("weights/kd")) == (0.2, None)
    assert (outcome.texts, outcome.pictures) == ({"table": "the table"}, {"pictures/scores": tmp_path / "scores.png"})
    assert finish == ("finish", 0)
    assert list(tmp_path.iterdir()) == [], "a sweep has no metrics.jsonl"
    track_sweep(TrackerConfig(name="wandb", group="mine"), tmp_path, "table1-0a1b", SWEEP, "", [])
    assert (opened[1][0].group, opened[1][0].title) == ("mine", "table1-0a1b")


def test_a_fault_of_the_tracker_ends_no_sweep(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fault = OSError("no space left")
    track_sweep(TrackerConfig(name="wandb"), tmp_path, "demo", SWEEP, "", [])
    assert [call[0] for call in recorder.calls] == ["record", "finish"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", None)
    track_sweep(TrackerConfig(name="wandb"), tmp_path, "demo", SWEEP, "", [])
    first, second = (record.message for record in caplog.records)
    assert first == "Recorder failed, the run continues: no space left"
    assert second.startswith("the sweep is not tracked: tracker=wandb")


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = TrackerConfig.model_validate({"name": name})
    with pytest.raises(UserError) as caught, open_tracker(config, tmp_path, "run", {}, "distill"):
        pass
    assert f"tracker={name}" in str(caught.value)
    assert f"pip install 'distill-run[{name}]'" in str(caught.value)


RESULTS: dict[str, Any] = {"results": [{"method": "alp", "score": 0.75}, {"method": "nkd"}]}


def picture(folder: Path) -> Path:
    """Of 3 by 2 red pixels."""
    pytest.importorskip("PIL.Image").new("RGB", (3, 2), "red").save(folder / "scores.png")
    return folder / "scores.png"


@pytest.mark.slow
def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TrackerConfig(name="tensorboard")
    with open_tracker(config, tmp_path, "run", {"task": "rte"}, "distill") as tracker:
        tracker.log({"loss": 0.5, "phase": "warm-up"}, step=1)
        tracker.log({"loss": 0.25}, step=2, epoch=1.0)
        summary = {"score": 0.75, "test/score": 0.5, "method": "alp", "settings/optim/lr": 2e-5}
        pictures = {"pictures/scores": picture(tmp_path)}
        tracker.record(Outcome(summary, RESULTS, {"table": "alp  75.00"}, pictures, tmp_path))
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("epoch")] == [(2, 1.0)]

    def text(name: str) -> str:
        return events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert text("summary").startswith("| name | value |\n| --- | --- |\n| score | 0.75 |\n")
    assert [event.value for name in ("score", "test/score") for event in events.Scalars(name)] == [0.75, 0.5]
    hparams = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    told = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (told["method"].string_value, told["settings/optim/lr"].number_value) == ("alp", 2e-5)
    assert text("results") == "| method | score |\n| --- | --- |\n| alp | 0.75 |\n| nkd |  |"
    assert '"task": "rte"' in text("config")
    assert text("table") == "```\nalp  75.00\n```"
    (image,) = events.Images("pictures/scores")
    assert (image.width, image.height) == (3, 2)
    assert len(lines(tmp_path)) == 2


def read_back(folder: Path, run_id: str) -> dict[str, Any]:
    """The one offline run of this id, as W&B's own reader sees it."""
    (run,) = (folder / "wandb").glob(f"offline-run-*-{run_id}")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


@pytest.mark.slow
def test_wandb_offline_is_read_back(
    wandb_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "b,c")
    config = TrackerConfig(name="wandb", project="pilot", tags=("a", "b"), title="alp on rte")
    with open_tracker(config, wandb_home, "key1", {"task": {"name": "rte"}}, "distill") as tracker:
        tracker.log({"loss": 0.5, "alpha/entropy": 2.0}, step=1, epoch=0.5)
        tracker.log({"loss": 0.25}, step=2, epoch=1.0)
        tracker.log({"loss": 0.125}, step=2, epoch=1.0)  # a step that comes again is not dropped
        tracker.record(Outcome({"score": 0.75}, RESULTS, model=wandb_home))  # no model unless asked for
    config = TrackerConfig(name="wandb")
    with contextlib.suppress(RuntimeError), open_tracker(config, wandb_home, "key2", {}, "teacher") as tracker:
        tracker.log({"loss": 4.0}, step=1)
        raise RuntimeError("diverged")
    first, second = read_back(wandb_home, "key1"), read_back(wandb_home, "key2")

    assert (first["project"], first["name"], first["run_id"]) == ("pilot", "alp on rte", "key1")
    assert first["tags"] == ["a", "b", "c"]
    assert first["config"] == {"task": {"name": "rte"}}
    assert first["exit_code"] == 0
    summary = first["summary"]
    assert summary.items() >= {"loss": 0.125, "alpha/entropy": 2.0, "score": 0.75, "step": 2}.items()
    assert summary["_step"] == 3, "three points and a table"
    (table,) = (wandb_home / "wandb").glob(f"*-key1/files/{summary['results']['path']}")
    assert json.loads(table.read_text())["data"] == [["alp", 0.75], ["nkd", None]]
    assert (second["exit_code"], second["summary"]["loss"]) == (1, 4.0)
    assert capfd.readouterr() == ("", ""), "the console belongs to the progress bar"


@pytest.mark.slow
@pytest.mark.parametrize("server", [None, "refuses", "never answers"])
def test_wandb_without_a_key_or_a_network_goes_offline(
    wandb_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server: str | None
) -> None:
    caplog.set_level(logging.INFO)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server:
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
            monkeypatch.setenv("WANDB_API_KEY", KEY)
            monkeypatch.setattr("distill_runner.tracking.trackers.WANDB_INIT_SECONDS", 2.0)
        if server == "never answers":
            listener.listen()
        start = time.perf_counter()
        with open_tracker(TrackerConfig(name="wandb"), wandb_home, "key", {}, "distill") as tracker:
            tracker.log({"loss": 0.5}, step=1)
        assert time.perf_counter() - start < 20
    assert read_back(wandb_home, "key")["summary"]["loss"] == 0.5
    assert "tracking offline" in caplog.text
    assert server or "API key" in caplog.text
    assert f"wandb sync {wandb_home}" in caplog.text
