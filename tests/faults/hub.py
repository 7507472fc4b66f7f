"""A small Hugging Face hub on this machine, as far as ``huggingface_hub`` asks: also out of order or moved on.

A repository is a folder for each revision; its commit is the hash of the files in it. Files with a suffix of LFS are
handed out under another path, as the real hub does from another server.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = {".safetensors", ".bin", ".parquet"}
API = re.compile(r"/api/(models|datasets)/(.+?)/(revision|tree)/([^/]+)(?:/(.*))?")
FILE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)")


@dataclass
class Faults:
    """What goes wrong, of requests whose path matches ``only``; nothing by default."""

    only: str = ""
    statuses: list[int] = field(default_factory=list)  # of the next requests, one after the other
    retry_after: int = 0
    cut_after: int = 0  # bytes of contents, then the connection is gone
    cuts: int = 0  # so many times
    reset: bool = False
    seconds: float = 0  # before each answer
    gated: bool = False


class Hub(ThreadingHTTPServer):
    """Serves ``folder/{models,datasets}/<owner>/<name>/<revision>/...``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults = folder, Faults()
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def contents(self) -> list[str]:
        """The files whose contents were asked for."""
        return [path.rpartition("/")[2] for path in self.requests if path.startswith("GET") and "resolve" in path]

    def commit(self, kind: str, name: str, revision: str) -> tuple[str, Path] | None:
        for folder in sorted((self.folder / kind / name).glob("*/")):
            sha = _hash("".join(f"{file.name}{_hash(file)}" for file in _files(folder)).encode())
            if revision in (folder.name, sha):
                return sha, folder
        return None


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub of the repositories in ``folder``, while the block lasts."""
    hub = Hub(folder)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _hash(content: Path | bytes, kind: str = "sha1") -> str:
    return hashlib.new(kind, content if isinstance(content, bytes) else content.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path, faults = unquote(urlsplit(self.path).path), self.server.faults
        self.server.requests.append(f"{self.command} {path}")
        threading.Event().wait(faults.seconds)  # tests replace time.sleep
        if faults.statuses and re.search(faults.only, path):
            wait = {"Retry-After": str(faults.retry_after)} if faults.retry_after else {}
            self._answer(faults.statuses.pop(0), {"error": "out of order"}, wait)
        elif found := API.fullmatch(path):
            self._describe(*found.groups())
        elif found := FILE.fullmatch(path):
            self._hand_out("datasets" if found[1] else "models", found[2], found[3], found[4])
        else:
            self._answer(404, {"error": "no such page"})

    do_HEAD = do_POST = do_GET

    def _describe(self, kind: str, name: str, what: str, revision: str, _below: str | None) -> None:
        if not (self.server.folder / kind / name).is_dir():
            self._answer(401, {}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
        elif (found := self.server.commit(kind, name, revision)) is None:
            self._answer(404, {}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif what == "revision":
            siblings = [{"rfilename": str(file.relative_to(found[1]))} for file in _files(found[1])]
            self._answer(200, {"id": name, "sha": found[0], "private": False, "tags": [], "siblings": siblings})
        else:
            self._answer(200, [_entry(file, found[1]) for file in _files(found[1])])

    def _hand_out(self, kind: str, name: str, revision: str, path: str) -> None:
        found = self.server.commit(kind, name, revision)
        file = found[1] / path if found else Path()
        if self.server.faults.gated:
            self._answer(401, {}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif found is None or not file.is_file():
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        elif file.suffix in LFS and "cdn" not in parse_qs(urlsplit(self.path).query):
            described = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-Etag": f'"{_hash(file, "sha256")}"'}
            place = {"Location": f"{self.path}?cdn=1", "X-Repo-Commit": found[0]}
            self._answer(302, None, {**described, **place})
        else:
            etag = _hash(file, "sha256") if file.suffix in LFS else _entry(file, found[1])["oid"]
            self._send(file.read_bytes(), {"X-Repo-Commit": found[0], "ETag": f'"{etag}"'})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        faults, start, whole = self.server.faults, 0, len(content)
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        content = content[start:]
        self._head(206 if asked else 200, {**headers, "Content-Length": str(len(content))})
        if self.command == "HEAD":
            return
        if faults.cuts and len(content) > faults.cut_after and re.search(faults.only, self.path):
            faults.cuts -= 1
            self.wfile.write(content[: faults.cut_after])
            self.close_connection = True
            if faults.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self.wfile.write(content)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """``Hub.requests`` has what was asked."""


def _entry(file: Path, folder: Path) -> dict[str, Any]:
    size = file.stat().st_size
    oid = _hash(f"blob {size}\0".encode() + file.read_bytes())
    entry = {"type": "file", "oid": oid, "size": size, "path": file.relative_to(folder).as_posix()}
    lfs = {"oid": _hash(file, "sha256"), "size": size, "pointerSize": 134}
    return entry | ({"lfs": lfs} if file.suffix in LFS else {})
