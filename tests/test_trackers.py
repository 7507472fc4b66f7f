"""Trackers beside W&B and TensorBoard, plugins, and finished runs that are sent later."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from distill_runner.commands.parser import run_subcommand
from distill_runner.commands.track import track_command
from distill_runner.common.errors import UserError
from distill_runner.tracking import trackers
from distill_runner.tracking.trackers import OPTIONAL, Outcome, Tracker, TrackerConfig, Values, headline, open_tracker
from helpers.fake_results import result

SETTINGS: Mapping[str, Any] = {
    "tracker": {"name": "none"},
    "optim": {"lr": 2e-5},
    "corpus": {"name": "books_wiki"},
    "transfer": {"name": "labeled"},
    "pretraining": {"name": "mlm_nsp"},
    "stages": {"student": {"corpus": None}},
}
RESULT: Mapping[str, Any] = result(task="rte", method="alp", teacher="tiny", score=0.75) | {"key": "0a1b2c"}


class Recorder(Tracker):
    """Keeps what it was told, of all runs."""

    calls: list[Any] = []  # noqa: RUF012

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        place = config.entity, config.group
        self.calls.append((config.name, config.project, config.tags, run_id, dict(settings), *place))

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        self.calls.append((dict(values), step, epoch))

    def record(self, outcome: Outcome) -> None:
        self.calls.append(headline(outcome.summary))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setitem(OPTIONAL, "wandb", Recorder)
    return Recorder.calls


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a finished run without a tracker."""
    folder = tmp_path / "rte-alp-0a1b2c"
    folder.mkdir()
    lines = [{"step": 1, "epoch": 0.5, "loss/kd": 0.25}, {"step": 2, "loss/kd": None, "validation/accuracy": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "result.json").write_text(json.dumps(RESULT))
    (folder / "status.json").write_text(json.dumps(RESULT))
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(SETTINGS)))
    return folder


def test_a_finished_run_is_sent_from_its_files(
    finished: Path, recorder: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^run=unfinished: has no finished run; all others were sent"):
        run_subcommand("track", ["unfinished", str(finished), "--project", "mine"])
    opened, *points, summary = recorder
    assert opened[:4] == ("wandb", "mine", ("rte", "alp", "tiny"), "0a1b2c")
    assert points == [({"loss/kd": 0.25}, 1, 0.5), ({"validation/accuracy": 0.75}, 2, None)]
    assert summary["score"] == 0.75
    assert (finished / "metrics.jsonl").read_text().count("\n") == 2, "nothing is written to the file that is read"
    assert "was sent to wandb, project mine" in capsys.readouterr().out


def test_the_printed_command_sends_to_the_same_place(finished: Path, recorder: list[Any]) -> None:
    config = TrackerConfig(name="wandb", project="our tests", entity="team", group="g 1")
    program, subcommand, *arguments = shlex.split(track_command(config, finished))
    assert program == "distill-run"
    run_subcommand(subcommand, arguments)
    assert recorder[0][:2] == ("wandb", "our tests")
    assert recorder[0][5:] == ("team", "g 1")
    assert "project" not in track_command(TrackerConfig(name="tensorboard"), finished)
    with pytest.raises(UserError, match="--tracker=none: sends nothing"):
        run_subcommand(subcommand, [str(finished), "--tracker", "none"])


def test_the_summary_has_what_runs_are_compared_by() -> None:
    values = {"score": 1, "settings/kd/weight": 0.2, "settings/optim/lr": 1e-5, "settings/kd/over_layers": "sum"}
    values |= {"account/data": "x", "history/1/accuracy": 0.5, "test/score": 0.5, "count/failed": 2}
    assert [*headline(values)] == ["score", "settings/kd/weight", "settings/optim/lr", "test/score", "count/failed"]


def test_the_tracker_that_the_documentation_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_package(group: str, name: str) -> str | None:
        return "my_package.PrintedLosses" if (group, name) == ("distill_runner.trackers", "printed") else None

    page = (Path(__file__).parents[1] / "docs" / "wandb.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_package.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(trackers, "entry_point", of_package)
    with open_tracker(TrackerConfig(name="printed"), tmp_path, "run", {}, "distill") as tracker:
        tracker.log({"loss": 1.0}, step=1)
        tracker.record(Outcome())
    assert not tracker.failed
    assert capsys.readouterr().out == f"project distill-run in {tmp_path}\n1 {{'loss': 1.0}}\n"
    with pytest.raises(UserError, match="there is no such tracker"):
        TrackerConfig(name="trackyo")


def test_an_agent_of_a_sweep_chooses_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import wandb

    caplog.set_level("INFO")
    init = Mock(return_value=Mock(url=None, disabled=True, dir=str(tmp_path)))
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda *_: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variables in ({}, {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "agents"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with open_tracker(TrackerConfig(name="wandb"), tmp_path, "0a1b", {"seed": 1}, "distill"):
            pass
    assert caplog.messages == ["W&B: off, by WANDB_MODE"] * 2, "nothing is there to be synchronized"
    own, agents = (call.kwargs for call in init.call_args_list)
    assert (own["id"], own["resume"], own["config"]) == ("0a1b", "allow", {"seed": 1})
    assert (agents["id"], agents["resume"], agents["config"]) == ("agents", None, {"seed": 1, "key": "0a1b"})


def test_what_a_tracker_did_not_take_is_an_error(
    finished: Path, recorder: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "was sent", although half of the curve was missing."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("507 Insufficient Storage")

    monkeypatch.setattr(Recorder, "log", refused)
    with pytest.raises(UserError, match="did not take all of"):
        run_subcommand("track", [str(finished), "--project", "mine"])
