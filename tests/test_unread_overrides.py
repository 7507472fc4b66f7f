"""Tests that an override which changes nothing is named."""

import pytest
from omegaconf import OmegaConf

from distill_runner.compose import run_config
from distill_runner.compose.run_config import unread_overrides


def test_only_what_nothing_reads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """schedule.rule=pid looks right, changes nothing, and gave the same key without a word."""
    stages = {
        "student": {
            "inherits": "template",
            "temperature": "${loss.temperature}",
            "model": {"layers": "${student.layers}"},
        }
    }
    monkeypatch.setattr(run_config, "complete_stages", lambda parts: parts["stages"])  # nothing is inherited here
    groups = {"loss": {"temperature": 1, "eta": 2}, "schedule": {"rule": "x"}, "student": {"layers": "first"}}
    config = OmegaConf.create({"stages": stages, "template": {}, "teacher": {}, "stage": "student", **groups})
    typed = ["loss.temperature=1", "student.layers=first", "seed=1", "method=nkd", "runtime.device=cpu"]
    assert unread_overrides(config, typed) == []
    end = "has no effect: nothing in this run reads it"
    assert unread_overrides(config, [*typed, "loss.eta=3"]) == [f"loss.eta=3 {end}"]
    assert unread_overrides(config, ["schedule.rule=pid"]) == [f"schedule.rule=pid {end}; did you mean schedule=pid?"]
