"""W&B's server accepts and never answers, or drips bytes: it costs its time limit once, here a shorter one."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from distill_runner.tracking.wandb import server_responds

pytestmark = pytest.mark.faults
PROGRAM = """
import time, sys
from pathlib import Path
from distill_runner.tracking import TrackerConfig, open_tracker, wandb
wandb.WANDB_ANSWER_SECONDS = 1.0
folder = Path(sys.argv[1])
for number in range(2):
    started = time.monotonic()
    with open_tracker(TrackerConfig(name="wandb", project="p"), folder, f"run{number}", {}, "distill") as tracker:
        inside = time.monotonic() - started
        tracker.log({"loss": 1.0}, step=1)
        ended = time.monotonic()
    print(inside + time.monotonic() - ended, flush=True)
"""


@pytest.fixture(params=["never", "drips"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Takes every connection; what it does then is its name."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        kept = []
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                kept.append(connection)
                if request.param == "drips":
                    Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.5)

    Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()


def test_a_server_that_does_not_answer_is_found_out(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, its answer would take days."""
    monkeypatch.setattr("distill_runner.tracking.wandb.WANDB_ANSWER_SECONDS", 1.0)
    assert not server_responds(server)


def test_a_silent_server_costs_seconds_once(server: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "run").mkdir()
    home = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {**home, "WANDB_BASE_URL": server, "WANDB_API_KEY": "0" * 40}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    started = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    whole = time.monotonic() - started
    assert ended.returncode == 0, ended.stderr
    print(f"first, second run: {ended.stdout.split()} s; all with its imports {whole:.0f} s")
    assert "did not answer a moment ago" in ended.stderr
