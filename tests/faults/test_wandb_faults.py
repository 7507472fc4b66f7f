"""W&B's server accepts and never answers: it costs its time limit, here a shorter one, and the run is offline."""

import socket
import time
from pathlib import Path

import pytest

from distill_runner.tracking import TrackerConfig, open_tracker, services

pytestmark = pytest.mark.faults


def test_a_silent_server_costs_seconds(
    wandb_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(services, "WANDB_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        started = time.monotonic()
        with open_tracker(TrackerConfig(name="wandb"), wandb_home, "run", {}, "distill") as tracker:
            tracker.log({"loss": 1.0}, step=1)
    assert time.monotonic() - started < 30
    assert "has not answered" in caplog.text
    assert list((wandb_home / "wandb").glob("offline-run-*-run"))
