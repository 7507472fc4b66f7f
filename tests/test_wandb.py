"""What reaches W&B's server, seen by one of our own: runs that were written offline, and the dashboard."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from distill_runner.commands.dashboard import as_json, dashboard, save
from distill_runner.common.errors import UserError
from distill_runner.tracking.trackers import Outcome, TrackerConfig, open_tracker, track_sweep

pytestmark = pytest.mark.slow

KEY = "0123456789" * 4


class Server(ThreadingHTTPServer):
    """Answers as W&B does, as far as these tests need, and keeps what it was sent.

    ``runs``: what each run was announced with; ``history``: its points; ``files``: by run and name; ``views``.
    ``received``: the bodies of all requests.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.files: dict[str, bytes] = {}
        self.views: list[dict[str, Any]] = []
        self.received: list[bytes] = []

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "UpsertBucket":
                self.runs.setdefault(given["name"], given)
                project = {"name": given["project"], "entity": {"name": "me"}}
                bucket = {"id": "1", "name": given["name"], "config": "{}", "project": project}
                return {"upsertBucket": {"inserted": True, "bucket": bucket}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/{given['run']}/{name}"} for name in given["files"]]
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            case "CreateArtifact":
                sequence = {"id": "1", "latestArtifact": {"id": "1", "versionIndex": 0}}
                artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": sequence}
                return {"createArtifact": {"artifact": artifact}}
            case "Viewer":
                return {"viewer": {"id": "1", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
            case "GetDefaultEntity":
                return {"viewer": {"id": "1", "entity": "me"}}
            case "UpsertView2":
                self.views.append(given)
                return {"upsertView": {"view": {"id": "1", "name": given["name"]}, "inserted": True}}
        return {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the console belongs to pytest."""

    def _body(self) -> bytes:
        self.server.received.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        return self.server.received[-1]

    def _reply(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.server.files[self.path.lstrip("/")] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            assert operation is not None
            self._reply({"data": self.server.answer(operation[1], asked.get("variables"))})
            return
        if self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"content": []})
            self.server.history.setdefault(self.path.split("/")[-2], []).extend(map(json.loads, history["content"]))
        self._reply({})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_wandb_sync_uploads_a_point_and_its_sweep(
    wandb_home: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = TrackerConfig(name="wandb", project="pilot", group="alp_kd/grid").with_tags("rte", "rkd")
    with open_tracker(config, wandb_home, "0a1b", {"optim": {"lr": 2e-5}}, "distill") as tracker:
        tracker.log({"loss/kd": 0.5}, step=1, epoch=0.5)
        tracker.log({"validation/accuracy": 0.75}, step=2, epoch=1.0)
        tracker.record(Outcome({"score": 0.75}))
    pytest.importorskip("PIL.Image").new("RGB", (3, 2)).save(file := wandb_home / "scores.png")
    results = [{"status": "done", "task": "rte", "method": "rkd", "score": 0.75}]
    config = TrackerConfig(name="wandb", project="pilot")
    track_sweep(config, wandb_home, "alp_kd/grid", results, "a < b", [file])

    folders = sorted(map(str, (wandb_home / "wandb").glob("offline-run-*")))
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Finished syncing") == 2, done.stderr

    point, sweep = server.runs["0a1b"], server.runs["sweep-alp_kd-grid"]
    assert (point["groupName"], point["jobType"], point["tags"]) == ("alp_kd/grid", "distill", ["rte", "rkd"])
    assert (sweep["groupName"], sweep["jobType"], sweep["tags"]) == ("alp_kd/grid", "sweep", ["rte", "rkd"])
    assert (point["displayName"], sweep["displayName"]) == ("run", "alp_kd/grid")
    assert json.loads(point["config"])["optim"] == {"value": {"lr": 2e-5}}
    first, second = server.history["0a1b"]
    assert (first["loss/kd"], first["epoch"], second["validation/accuracy"], second["step"]) == (0.5, 0.5, 0.75, 2)
    assert json.loads(server.files["0a1b/wandb-summary.json"])["score"] == 0.75

    def sent(kind: str) -> bytes:
        (name,) = (name for name in server.files if name.startswith(f"sweep-alp_kd-grid/media/{kind}"))
        return server.files[name]

    assert sent("images/pictures/scores") == file.read_bytes()
    assert json.loads(sent("table/points"))["data"] == [["done", "rte", "rkd", 0.75]]
    assert b"<pre>a &lt; b</pre>" in sent("html/table")
    # The offline file names the folder where W&B keeps what is to be sent; it must not be sent itself.
    assert not [body[:200] for body in server.received if str(wandb_home.parent).encode() in body]


@pytest.mark.usefixtures("wandb_home")
def test_a_dashboard_is_saved_for_the_account(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    view = dashboard("pilot", "", None, ["ce"])
    address = save(view)
    (sent,) = server.views
    assert (sent["entityName"], sent["projectName"], sent["displayName"]) == ("me", "pilot", "Distillation")
    assert json.loads(sent["spec"]) == json.loads(as_json(view))
    assert address.startswith(f"{server.url}/me/pilot?nw=")


@pytest.mark.usefixtures("wandb_home")
def test_a_dashboard_without_an_account_says_what_to_do() -> None:
    pytest.importorskip("wandb_workspaces")
    with pytest.raises(UserError, match=r"API key(.|\n)*--print"):
        save(dashboard("pilot", "me", None, ["ce"]))
