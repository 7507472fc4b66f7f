"""A server that takes uploads as the hub does, and keeps what it is sent."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload of small files needs."""

    seen: list[tuple[str, bytes]]
    address: str
    is_private = True

    @classmethod
    def files(cls) -> dict[str, bytes]:
        """Return the content of the uploaded files by path."""
        (commit,) = [body for path, body in cls.seen if "/commit/" in path]
        entries = [entry["value"] for entry in map(json.loads, commit.splitlines()) if entry["key"] == "file"]
        return {entry["path"]: base64.b64decode(entry["content"]) for entry in entries}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.path, body))
        if self.path.endswith("/repos/create"):
            answer = {"url": "https://huggingface.co/me/student", "name": "me/student", "id": "1"}
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            answer = {"files": files}  # type: ignore[dict-item]
        elif "/commit/" in self.path:
            at = "https://huggingface.co/me/student/commit/1"
            answer = {"commitUrl": at, "commitOid": "1", "pullRequestUrl": None}  # type: ignore[dict-item]
        else:
            answer = {}
        self._say(200, answer)

    def do_GET(self) -> None:
        self.seen.append((self.path, b""))
        info = {"sha": "0", "id": "me/student", "siblings": [], "name": "me", "type": "user"}
        self._say(200, {**info, "private": self.is_private})

    def _say(self, code: int, answer: object) -> None:
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def upload_hub() -> Iterator[type[Hub]]:
    """Run a server on this machine; its class knows what it was sent."""

    class OwnHub(Hub):
        pass

    OwnHub.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), OwnHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    OwnHub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield OwnHub
    finally:
        server.shutdown()
        server.server_close()
