"""Repositories of the Hugging Face hub: the commit that a run reads, and its files on this machine.

The name of a repository is resolved to a commit once. A run reads all files of the repository from that commit, and
never from another commit in the cache. Files of the commit that are in the cache cost no request.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal, TypeVar

from filelock import FileLock

from distill_runner.common.errors import Unavailable, UserError, causes, root_cause
from distill_runner.common.files import DISK_FULL, atomic_replacement, file_sha256
from distill_runner.common.library_switches import REQUEST_SECONDS, configure_hub_client
from distill_runner.common.process import environment_variable

log = logging.getLogger(__name__)

RepoType = Literal["model", "dataset"]
Value = TypeVar("Value")
COMMITS = "DISTILL_HUB_COMMITS"
"""Environment variable that passes the commits resolved by a sweep to the processes of its points."""
LARGE_FILE = 10_000_000
"""Size in bytes from which a later process resumes a download; smaller files start again."""
TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
TRIES, TRIES_TO_CONNECT = 6, 2
LONGEST_WAIT = 330.0
"""Longest wait before a retry, in seconds. The hub counts requests in windows of five minutes."""
_connect = cache(configure_hub_client)

# Errors


class HubError(Exception):
    """Files of the hub are unavailable; ``problem`` says why in a message for the user.

    Args:
        temporary: whether the cause is not the user's mistake and may be gone later, such as a lost network.
    """

    def __init__(self, problem: str, remedy: str = "", temporary: bool = False) -> None:
        self.problem, self.remedy, self.temporary = problem, remedy, temporary
        super().__init__(problem)

    def for_key(self, key: str, value: Any, remedy: str) -> UserError:
        """Return the same problem as an error of ``key``; ``remedy`` is used if this error has no remedy."""
        return (Unavailable if self.temporary else UserError)(key, value, self.problem, self.remedy or remedy)


def is_offline(error: BaseException) -> bool:
    """Return whether ``HF_HUB_OFFLINE`` prevented the request."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(cause, OfflineModeIsEnabled) for cause in causes(error))


def hub_error(error: Exception, repo_type: RepoType, name: str, revision: str | None) -> HubError:
    """Return the ``HubError`` that explains an error of the hub's libraries.

    Raises:
        OSError: ``error`` was caused by a full disk.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, HubError):
        return error
    for cause in causes(error):
        if isinstance(cause, GatedRepoError):
            page = f"https://huggingface.co/{'datasets/' * (repo_type == 'dataset')}{name}"
            problem = "is gated: you must accept its terms and log in to download it"
            return HubError(problem, f"Accept at {page}, then: hf auth login")
        if isinstance(cause, RevisionNotFoundError):
            return HubError(f"has no revision '{revision}'", "Its branches, tags and commits are on the hub's page.")
        if isinstance(cause, RepositoryNotFoundError | HFValidationError):
            repository = repo_type
            return HubError(f"neither a folder here nor a {repository} on the hub")
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            reason = " (its rate limit is reached)" if status == 429 else ""
            return HubError(f"the hub answers {status}{reason}", "Repeat the command later to resume.", True)
    if is_offline(error):
        return HubError("not downloaded before, and HF_HUB_OFFLINE forbids asking the hub")
    return HubError(f"the hub cannot be reached ({root_cause(error)})", temporary=True)


# Retries


def _with_retries(request: Callable[[], Value], progress: Callable[[], int] = lambda: 0) -> Value:
    """Return the result of ``request``, and repeat it after temporary failures, as late as the hub asks for.

    ``huggingface_hub`` itself retries some of its requests only (seen in 2.4): not the look-up of a revision
    (``HfApi.repo_info``), nor a file at a 5xx status or a reset connection (``http_get``).

    Args:
        progress: number of bytes downloaded so far. After progress, the count of tries starts again.
    """
    tries, num_bytes = 0, progress()
    while True:
        try:
            return request()
        except Exception as error:
            if progress() > num_bytes:
                tries, num_bytes = 0, progress()
            tries += 1
            wait = _seconds_to_wait(error, tries)
            if wait is None:
                raise
            if wait >= 2:
                log.info("the hub: %s; trying again in %.0f s", root_cause(error), wait)
            time.sleep(wait)


def _seconds_to_wait(error: Exception, tries: int) -> float | None:
    """Return the seconds to wait before the next try after ``tries`` failures; None if another try is of no use."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    backoff = min(2.0 ** (tries - 1), 8.0)
    for cause in causes(error):
        if isinstance(cause, HfHubHTTPError):
            retries = TRIES if cause.response.status_code in TEMPORARY_STATUSES else 0
            backoff = _requested_wait(cause.response.headers) or backoff
        elif isinstance(cause, httpx.ConnectError | httpx.TimeoutException):
            retries = TRIES_TO_CONNECT
        elif isinstance(cause, httpx.NetworkError | httpx.RemoteProtocolError):
            retries = TRIES
        else:
            continue
        return backoff if tries < retries and backoff <= LONGEST_WAIT else None
    return None


def _requested_wait(headers: Any) -> float | None:
    """Return the seconds to wait, from ``Retry-After`` or the hub's own rate limit header; None if neither is there."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    seconds, limit = headers.get("Retry-After", ""), parse_ratelimit_headers(headers)
    return float(seconds) if re.fullmatch(r"\d+", seconds) else float(limit.reset_in_seconds) if limit else None


# Repositories and commits


def is_hub_id(name: str) -> bool:
    """Return whether a model or dataset is one of the hub: ``owner/name``, perhaps with a revision, and no folder."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+(?:@\w+)?", name) is not None and not Path(name).exists()


@dataclass(frozen=True)
class Commit:
    """Commit of a repository.

    ``name`` is the repository's name, such as ``google-bert/bert-base-uncased``. If the hub was asked, it is the
    current name, which may differ from the requested one.
    """

    repo_type: RepoType
    name: str
    sha: str

    @property
    def folder(self) -> Path:
        """Folder in the cache that holds the commit's downloaded files."""
        return _cache_folder(self.repo_type, self.name) / "snapshots" / self.sha


def resolve_commit(repo_type: RepoType, name: str, revision: str | None) -> Commit:
    """Return the commit that ``revision`` (``main`` by default) points to.

    The hub is asked once per process. The points of a sweep use the commits that the sweep has resolved.

    Raises:
        HubError: the revision does not exist, or neither the hub nor an earlier download can resolve it.
    """
    outcome = _resolved_commit(repo_type, name, revision or "main")
    if isinstance(outcome, HubError):
        raise outcome
    return outcome


@contextmanager
def shared_commits() -> Iterator[None]:
    """Pass the commits resolved so far on to processes that are started in this context."""
    with environment_variable(COMMITS, json.dumps({**_inherited_commits(), **_RESOLVED})):
        yield


_RESOLVED: dict[str, str] = {}
"""Commits resolved by this process: ``repo_type:name@revision`` -> ``name@sha``."""


def _inherited_commits() -> dict[str, str]:
    commits: dict[str, str] = json.loads(os.environ.get(COMMITS, "{}"))
    return commits


def forget_commits() -> None:
    """Forget the commits resolved by this process, so that the hub is asked again."""
    _resolved_commit.cache_clear()
    _RESOLVED.clear()


@cache
def _resolved_commit(repo_type: RepoType, name: str, revision: str) -> Commit | HubError:
    """Return the commit, or the error, which is cached as well so that a failing hub is not asked again."""
    key = f"{repo_type}:{name}@{revision}"
    try:
        if inherited := _inherited_commits().get(key):
            commit = Commit(repo_type, *inherited.split("@"))
        elif re.fullmatch("[0-9a-f]{40}", revision):
            commit = Commit(repo_type, name, revision)
        else:
            commit = request_commit(repo_type, name, revision)
    except HubError as error:
        return error
    _RESOLVED[key] = f"{commit.name}@{commit.sha}"
    return commit


def request_commit(repo_type: RepoType, name: str, revision: str) -> Commit:
    """Ask the hub for a commit; without an answer, return the commit of the last download with a warning."""
    from huggingface_hub import HfApi

    cached_sha = _cached_sha(repo_type, name, revision)
    try:
        _connect()
        api = HfApi()
        info = _with_retries(
            lambda: api.repo_info(name, repo_type=repo_type, revision=revision, timeout=REQUEST_SECONDS)
        )
    except Exception as error:
        reason = hub_error(error, repo_type, name, revision)
        if cached_sha is None or not (reason.temporary or is_offline(error)):
            raise reason from error
        if reason.temporary:
            log.warning("%s: %s; using the copy downloaded before, at commit %s", name, reason.problem, cached_sha[:8])
        return Commit(repo_type, name, cached_sha)
    assert info.sha is not None
    if cached_sha not in (None, info.sha):
        short = str(cached_sha)[:8]
        log.warning("%s: %s has moved from %s to %s since its download", name, revision, short, info.sha[:8])
        log.warning("  use %s@%s, or revision=%s, to keep the old one", name, short, cached_sha)
    cache_folder, current = _cache_folder(repo_type, name), _cache_folder(repo_type, info.id)
    if info.id != name and not cache_folder.exists():  # lets an offline run find the cache by the old name
        current.mkdir(parents=True, exist_ok=True)
        cache_folder.symlink_to(current.name)
    return Commit(repo_type, info.id, info.sha)


# Files


def download(commit: Commit, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files that match ``patterns`` and are not in the cache; return the folder of the commit.

    Args:
        revision: the revision that was resolved to this commit. It is recorded for runs that cannot ask the hub.
    Raises:
        HubError: the files cannot be downloaded.
        OSError: the disk is full.
    """
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class NoBar(tqdm):
        """Progress bar of ``snapshot_download`` that draws nothing: large files have bars of their own."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    if (missing := missing_files(commit, patterns)) == []:
        return commit.folder
    _connect()
    size, started = sum(file.size for file in missing or []), time.monotonic()
    _require_space(commit, size)
    if size >= LARGE_FILE:
        log.info("downloading %s: %.1f MB", commit.name, size / 1e6)
    try:
        for file in missing or []:
            if file.size >= LARGE_FILE:
                _download_large_file(commit, file.path)
        options: dict[str, Any] = {"repo_type": commit.repo_type, "revision": commit.sha, "tqdm_class": NoBar}
        folder = _with_retries(lambda: snapshot_download(commit.name, allow_patterns=list(patterns), **options))
    except KeyboardInterrupt:
        cache_folder = _cache_folder(commit.repo_type, commit.name)
        log.warning("the files downloaded so far are kept in %s: repeat the command to resume", cache_folder)
        raise
    except Exception as error:
        if commit.folder.is_dir() and is_offline(error) and file_names(commit) is None:
            return commit.folder  # downloaded by another program, which stored no list of files
        raise hub_error(error, commit.repo_type, commit.name, revision) from error
    if size >= LARGE_FILE:
        log.info("downloaded %s in %.0f s", commit.name, time.monotonic() - started)
    if revision and revision != commit.sha:
        _record_revision(commit, revision)
    return Path(folder)


def _download_large_file(commit: Commit, path: str) -> None:
    """Download a file so that a later process resumes where an earlier one was interrupted.

    ``huggingface_hub`` drops an incomplete file when the process ends. Here it stays in the cache as
    ``<checksum>.partial``, next to its final place, where ``huggingface_hub`` finds the complete file. A file for which
    the hub has no SHA-256 checksum is left to ``huggingface_hub``.

    Raises:
        OSError: the disk is full, or the downloaded file has a wrong checksum.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from tqdm import tqdm

    url = hf_hub_url(commit.name, path, repo_type=commit.repo_type, revision=commit.sha)
    headers = build_hf_headers()
    metadata = _with_retries(lambda: get_hf_file_metadata(url, headers=headers))
    checksum = metadata.etag or ""
    if not re.fullmatch("[0-9a-f]{64}", checksum):
        return
    blobs = _cache_folder(commit.repo_type, commit.name) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    blob, part = blobs / checksum, blobs / f"{checksum}.partial"

    def resume() -> None:
        with part.open("ab") as stream:
            if stream.tell():
                log.info("downloading %s: resuming after %.1f MB", commit.name, stream.tell() / 1e6)
            bar = partial(tqdm, disable=None, leave=False)  # drawn on a terminal only
            options: dict[str, Any] = {"headers": headers, "expected_size": metadata.size, "tqdm_class": bar}
            http_get(url, stream, resume_size=stream.tell(), displayed_filename=path, **options)

    with FileLock(f"{part}.lock"):
        if blob.exists():
            return
        _with_retries(resume, lambda: part.stat().st_size if part.exists() else 0)
        if file_sha256(part) != checksum:
            part.unlink()
            raise OSError(f"{path} was damaged during the download")
        part.rename(blob)


def file_names(commit: Commit) -> list[str] | None:
    """Return the paths of the commit's files; None if the cache holds no list of them."""
    files = file_ids(commit)
    return None if files is None else list(files)


def file_ids(commit: Commit) -> dict[str, str] | None:
    """Return git's ids of the contents of the commit's files by path; None if the cache holds no list of files.

    Commits that differ in other files, such as a README, agree in these ids.
    """
    files = _listed_files(commit)
    return None if files is None else {file.path: file.blob_id for file in files}


def content_hash(ids: Mapping[str, str], names: Iterable[str]) -> str:
    """Return a hash of the names and contents of some files of a commit; ``ids`` are those of ``file_ids``."""
    return hashlib.sha256("".join(f"{name}\0{ids[name]}\n" for name in sorted(names)).encode()).hexdigest()


def _listed_files(commit: Commit) -> list[Any] | None:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return get_cached_repo_tree(commit.name, repo_type=commit.repo_type, revision=commit.sha)
    except CachedRepoTreeNotFoundError:
        return None


def matching_files(files: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the files that match any of ``patterns``."""
    return [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]


def missing_files(commit: Commit, patterns: Sequence[str]) -> list[Any] | None:
    """Return the files that match ``patterns`` and are not in the cache; None if the cache holds no list of files."""
    files = _listed_files(commit)
    if files is None:
        return None
    folder = commit.folder
    return [file for file in files if matching_files([file.path], patterns) and not (folder / file.path).exists()]


def _require_space(commit: Commit, size: int) -> None:
    folder = _cache_folder(commit.repo_type, commit.name)
    if folder.exists() and size > (free := disk_usage(folder).free):
        problem = f"needs {size / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {folder.parent}"
        raise HubError(problem, "Free some space, or set HF_HOME to a folder on a larger disk.", temporary=True)


def _cache_folder(repo_type: RepoType, name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{repo_type}s--{name.replace('/', '--')}"


def _cached_sha(repo_type: RepoType, name: str, revision: str) -> str | None:
    """Return the commit that ``revision`` pointed to at the last download; None if there was none."""
    try:
        return (_cache_folder(repo_type, name) / "refs" / revision).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _record_revision(commit: Commit, revision: str) -> None:
    file = _cache_folder(commit.repo_type, commit.name) / "refs" / revision
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replacement(file) as new_file:
        new_file.write_text(commit.sha, encoding="utf-8")
