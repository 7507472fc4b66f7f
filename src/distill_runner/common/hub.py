"""Repositories of the Hugging Face hub: the commit that a run reads, and its files on this machine.

The name of a repository is resolved to a commit once. A run reads all files of the repository from that commit, and
never from another commit in the cache. Files of the commit that are in the cache cost no request.
"""

import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from shutil import disk_usage
from typing import Any

from distill_runner.common import large_files
from distill_runner.common.hub_errors import Kind, NotThere, is_offline, meaning
from distill_runner.common.terminal import Fetching

log = logging.getLogger(__name__)

PINS = "DISTILL_HUB_COMMITS"
"""Environment variable that passes the commits resolved by a sweep to the processes of its points."""
SECONDS_TO_ANSWER = 10.0


@dataclass(frozen=True)
class Commit:
    """Commit of a repository.

    ``name`` is the repository's name, such as ``google-bert/bert-base-uncased``. If the hub was asked, it is the
    current name, which may differ from the requested one.
    """

    kind: Kind
    name: str
    sha: str

    @property
    def folder(self) -> Path:
        """Folder in the cache that holds the commit's downloaded files."""
        return _cache_of(self.kind, self.name) / "snapshots" / self.sha


def commit(kind: Kind, name: str, revision: str | None) -> Commit:
    """Return the commit that ``revision`` (``main`` by default) points to.

    The hub is asked once per process. The points of a sweep use the commits that the sweep has resolved.

    Raises:
        NotThere: the revision does not exist, or neither the hub nor an earlier download can resolve it.
    """
    found = _outcome(kind, name, revision or "main")
    if isinstance(found, NotThere):
        raise found
    return found


@contextmanager
def shared() -> Iterator[None]:
    """Pass the commits resolved so far on to processes that are started in this context."""
    before = os.environ.get(PINS)
    os.environ[PINS] = json.dumps({**_pins(), **_RESOLVED})
    try:
        yield
    finally:
        if before is None:
            del os.environ[PINS]
        else:
            os.environ[PINS] = before


_RESOLVED: dict[str, str] = {}
"""Commits resolved by this process: ``kind:name@revision`` -> ``name@sha``."""


def _pins() -> dict[str, str]:
    pins: dict[str, str] = json.loads(os.environ.get(PINS, "{}"))
    return pins


def forget() -> None:
    """Forget the commits resolved by this process, so that the hub is asked again."""
    _outcome.cache_clear()
    _RESOLVED.clear()


@cache
def _outcome(kind: Kind, name: str, revision: str) -> Commit | NotThere:
    key = f"{kind}:{name}@{revision}"
    try:
        if pinned := _pins().get(key):
            found = Commit(kind, *pinned.split("@"))
        elif re.fullmatch("[0-9a-f]{40}", revision):
            found = Commit(kind, name, revision)
        else:
            found = _ask(kind, name, revision)
    except NotThere as error:
        return error
    _RESOLVED[key] = f"{found.name}@{found.sha}"
    return found


def _ask(kind: Kind, name: str, revision: str) -> Commit:
    from huggingface_hub import HfApi

    known = _known_commit(kind, name, revision)
    try:
        connect()
        info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=SECONDS_TO_ANSWER)
    except Exception as error:
        why = meaning(error, kind, name, revision)
        if known is None or not (why.network or is_offline(error)):
            raise why from error
        if why.network:
            log.warning("%s: %s; using the copy downloaded before, at commit %s", name, why.problem, known[:8])
        return Commit(kind, name, known)
    assert info.sha is not None
    if known not in (None, info.sha):
        log.warning("%s: %s has moved from %s to %s since its download", name, revision, str(known)[:8], info.sha[:8])
        log.warning("  use %s@%s, or revision=%s, to keep the old one", name, str(known)[:8], known)
    if info.id != name and not (_cache_of(kind, name)).exists():  # lets an offline run find the cache by the old name
        _cache_of(kind, info.id).mkdir(parents=True, exist_ok=True)
        _cache_of(kind, name).symlink_to(_cache_of(kind, info.id).name)
    return Commit(kind, info.id, info.sha)


def fetch(of: Commit, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files that match ``patterns`` and are not in the cache; return the folder of the commit.

    Args:
        revision: the revision that was resolved to this commit. It is recorded for runs that cannot ask the hub.
    Raises:
        NotThere: the files cannot be downloaded.
        OSError: the disk is full.
    """
    from huggingface_hub import hf_hub_url, snapshot_download

    chosen: dict[str, Any] = {"repo_type": of.kind, "revision": of.sha, "allow_patterns": list(patterns)}
    missing = _missing(of, patterns)
    if missing == []:
        return of.folder
    connect()
    _require_space(of, missing or [])
    try:
        with Fetching(of.name, sum(file.size for file in missing or [])) as bar:
            large = [file.path for file in missing or [] if file.size >= large_files.LARGE]
            urls = [hf_hub_url(of.name, file, repo_type=of.kind, revision=of.sha) for file in large]
            large_files.fetch_large(urls, of.folder.parents[1] / "blobs", bar.kind)
            folder = Path(snapshot_download(of.name, tqdm_class=bar.kind, **chosen))
    except KeyboardInterrupt:
        log.warning("the files downloaded so far are kept in %s: repeat the command to resume", of.folder.parents[1])
        raise
    except Exception as error:
        if of.folder.is_dir() and is_offline(error) and names(of) is None:
            return of.folder  # downloaded by another program, which stored no list of files
        raise meaning(error, of.kind, of.name, revision) from error
    if revision and revision != of.sha:
        _remember(of, revision)
    return folder


def names(of: Commit) -> list[str] | None:
    """Return the paths of the commit's files; None if the cache holds no list of them."""
    files = _files(of)
    return None if files is None else [file.path for file in files]


def _files(of: Commit) -> list[Any] | None:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return get_cached_repo_tree(of.name, repo_type=of.kind, revision=of.sha)
    except CachedRepoTreeNotFoundError:
        return None


def matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the files that match any of ``patterns``."""
    return [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]


def _missing(of: Commit, patterns: Sequence[str]) -> list[Any] | None:
    """Return the files that match ``patterns`` and are not in the cache; None if the cache holds no list of files."""
    there = _files(of)
    if there is None:
        return None
    return [file for file in there if matching([file.path], patterns) and not (of.folder / file.path).exists()]


def _require_space(of: Commit, missing: Sequence[Any]) -> None:
    place, needed = _cache_of(of.kind, of.name), sum(file.size for file in missing)
    if place.exists() and needed > (free := disk_usage(place).free):
        problem = f"needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {place.parent}"
        raise NotThere(problem, "Make room, or set HF_HOME to a folder on a larger disk.", network=True)


def _cache_of(kind: Kind, name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{kind}s--{name.replace('/', '--')}"


def _known_commit(kind: Kind, name: str, revision: str) -> str | None:
    """Return the commit that ``revision`` pointed to at the last download; None if there was none."""
    try:
        return (_cache_of(kind, name) / "refs" / revision).read_text().strip() or None
    except OSError:
        return None


def _remember(of: Commit, revision: str) -> None:
    file = _cache_of(of.kind, of.name) / "refs" / revision
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.tmp")
    partial.write_text(of.sha)
    partial.replace(file)


@cache
def connect() -> None:
    """Make all libraries retry their requests to the hub, and silence their messages about these requests."""
    from huggingface_hub.utils import logging as hub_logging

    from distill_runner.common import hub_client

    hub_client.connect()
    hub_logging.set_verbosity(logging.CRITICAL)
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
