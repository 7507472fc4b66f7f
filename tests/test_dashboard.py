"""The dashboard: its JSON is one that the library reads back, and it shows nothing that no run sends."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_runner.commands.dashboard import CELL, as_json, dashboard, metric_names
from distill_runner.commands.parser import run_subcommand
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.metrics import CLASSIFICATION_METRICS

TERMS = ["ce", "kd", "intermediate"]


@pytest.fixture(autouse=True)
def _needs_the_package() -> None:
    pytest.importorskip("wandb_workspaces")


def panels(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Section -> its panels."""
    return {section["name"]: section["panels"] for section in spec["section"]["panelBankConfig"]["sections"]}


def printed_spec(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints."""
    run_subcommand("dashboard", ["--print", *arguments])
    spec: dict[str, Any] = json.loads(capsys.readouterr().out)
    return spec


def test_print_needs_no_account(capsys: pytest.CaptureFixture[str]) -> None:
    (runs,) = printed_spec("--sweep", "alp_kd/table1", capsys=capsys)["section"]["runSets"]
    (condition,) = runs["filters"]["filters"]
    assert (condition["key"], condition["op"], condition["value"]) == (
        {"section": "run", "name": "group"},
        "=",
        "alp_kd/table1",
    )
    assert runs["runFeed"]["columnOrder"][:3] == ["run:displayName", "summary:task", "summary:method"]
    assert runs["sort"]["keys"] == [{"key": {"section": "summary", "name": "score"}, "ascending": False}]
    assert printed_spec(capsys=capsys)["section"]["runSets"][0]["filters"]["filters"] == []


def test_panels() -> None:
    sections = panels(json.loads(as_json(dashboard("pilot", "me", None, TERMS))))
    kinds = {name: [panel["viewType"] for panel in content] for name, content in sections.items()}
    curve, scatter = "Run History Line Plot", "Scatter Plot"
    assert kinds == {
        "Results": ["Bar Chart", "Bar Chart", "Media Browser", "Weave"],
        "Scores by epoch": [curve] * len(metric_names()),
        "Scores by label": ["Weave"],
        "Losses": [curve] * 4,
        "Hyper-parameters": [scatter] * 5 + ["Parallel Coordinates Plot", "Parameter Importance"],
        "Training": [curve] * 2,
    }
    mean, best = (panel["config"] for panel in sections["Results"][:2])
    assert (mean["groupAgg"], best["groupAgg"], mean["groupBy"]) == ("mean", "max", "cell.value")
    assert "mean" in mean["chartTitle"]
    assert "best" in best["chartTitle"]
    lr, temperature = (panel["config"] for panel in sections["Hyper-parameters"][:2])
    assert (lr["xAxis"], lr["xAxisLogScale"], lr["yAxis"]) == ("summary:settings/optim/lr", True, "summary:score")
    assert (temperature["xAxis"], "xAxisLogScale" in temperature) == ("summary:settings/kd/temperature", False)


@pytest.mark.slow
def test_it_shows_nothing_that_no_run_sends(
    compose: Callable[..., RunConfig], wandb_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill_runner.running import run_stage

    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = f"task.metrics=[{','.join(CLASSIFICATION_METRICS)}]"
    run = compose("method=alp", "tracker=wandb", metrics, "runtime.log_every=1", "tracker.group=pilot")
    run_stage(run, wandb_home, {"seed": run.seed})
    (written,) = (wandb_home / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(written)]
    sent = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert sent["config"] == {"seed": 42, "cell": "tiny_task0 alp all"}
    assert sent["tags"] == ["tiny_task0", "alp", "custom"]

    spec = json.loads(as_json(dashboard("pilot", "me", None, TERMS)))
    sections = panels(spec)
    curves = [panel["config"] for name in ("Scores by epoch", "Losses", "Training") for panel in sections[name]]
    lines = [json.loads(line) for line in (wandb_home / "metrics.jsonl").read_text().splitlines()]
    for curve in curves:
        (name,) = curve["metrics"]
        if name.removeprefix("validation/") in CLASSIFICATION_METRICS or not name.startswith("validation/"):
            assert any(name in line and curve["xAxis"] in line for line in lines), name
    columns = {name.removeprefix("summary:") for name in spec["section"]["runSets"][0]["runFeed"]["columnOrder"]}
    assert columns - set(sent["summary"]) == {"run:displayName", "published/value"}, "no paper has a task of one's own"
    axes = {panel["config"]["xAxis"] for panel in sections["Hyper-parameters"][:5]}
    assert axes <= {f"summary:{name}" for name in columns}
    assert CELL in sent["config"]
