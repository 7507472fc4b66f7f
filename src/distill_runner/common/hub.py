"""Repositories of the Hugging Face hub: the commit that a run reads, its files in the cache, and errors of the hub.

The name of a repository is resolved to a commit once. A run reads all files of the repository from that commit, and
never from another commit in the cache. Files of the commit that are in the cache cost no request.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from distill_runner.common.errors import Unavailable, UserError, causes, root_cause
from distill_runner.common.files import DISK_FULL, atomic_replacement
from distill_runner.common.library_switches import REQUEST_SECONDS, configure_hub_client
from distill_runner.common.process import environment_variable

log = logging.getLogger(__name__)

RepoType = Literal["model", "dataset"]
Value = TypeVar("Value")
OFFLINE = "HF_HUB_OFFLINE"
COMMITS = "DISTILL_HUB_COMMITS"
"""Environment variable that passes the commits resolved by a sweep to the processes of its points."""
TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
PAUSES = (1.0, 4.0, 16.0)
"""Seconds before a request is repeated that failed for a reason that may be gone then."""
LARGE_FILES = 10_000_000
"""Size in bytes from which a download is logged."""
connect = cache(configure_hub_client)

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
    from huggingface_hub import errors

    if isinstance(error, HubError):
        return error
    for cause in causes(error):
        if isinstance(cause, errors.GatedRepoError):
            page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{name}"
            problem = "is gated: you must accept its terms and log in to download it"
            return HubError(problem, f"Accept at {page}, then: hf auth login")
        if isinstance(cause, errors.RevisionNotFoundError):
            return HubError(f"has no revision '{revision}'", "Its branches, tags and commits are on the hub's page.")
        if isinstance(cause, errors.RepositoryNotFoundError | errors.HFValidationError):
            return HubError(f"neither a folder here nor a {repo_type} on the hub")
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause
        if isinstance(cause, errors.HfHubHTTPError):
            status = cause.response.status_code
            reason = " (its rate limit is reached)" if status == 429 else ""
            return HubError(f"the hub answers {status}{reason}", "Repeat the command later.", True)
    if is_offline(error):
        return HubError(f"not downloaded before, and {OFFLINE} forbids asking the hub")
    return HubError(f"the hub cannot be reached ({root_cause(error)})", temporary=True)


def with_retries(request: Callable[[], Value]) -> Value:
    """Return the result of ``request``, repeated after a status or a broken connection that may be gone then.

    ``huggingface_hub`` itself repeats some of its requests only: not the look-up of a revision, nor a file at a 5xx
    status or a reset connection.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    def is_temporary(cause: BaseException) -> bool:
        if isinstance(cause, errors.HfHubHTTPError):
            return cause.response.status_code in TEMPORARY_STATUSES
        return isinstance(cause, httpx.ReadError | httpx.RemoteProtocolError)

    for pause in PAUSES:
        try:
            return request()
        except Exception as error:
            if not any(map(is_temporary, causes(error))):
                raise
            log.info("the hub: %s; trying again in %.0f s", root_cause(error), pause)
            time.sleep(pause)
    return request()


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
        return cache_folder(self.repo_type, self.name) / "snapshots" / self.sha


RESOLVED: dict[str, "Commit | HubError"] = {}
"""What this process has resolved, by ``repo_type:name@revision``; with errors, so that the hub is asked once."""


def resolve_commit(repo_type: RepoType, name: str, revision: str | None) -> Commit:
    """Return the commit that ``revision`` (``main`` by default) points to.

    The hub is asked once per process. The points of a sweep use the commits that the sweep has resolved.

    Raises:
        HubError: the revision does not exist, or neither the hub nor an earlier download can resolve it.
    """
    revision = revision or "main"
    key = f"{repo_type}:{name}@{revision}"
    if key not in RESOLVED:
        if inherited := _inherited_commits().get(key):
            RESOLVED[key] = Commit(repo_type, *inherited.split("@"))
        elif re.fullmatch("[0-9a-f]{40}", revision):
            RESOLVED[key] = Commit(repo_type, name, revision)
        else:
            try:
                RESOLVED[key] = request_commit(repo_type, name, revision)
            except HubError as error:
                RESOLVED[key] = error
    outcome = RESOLVED[key]
    if isinstance(outcome, HubError):
        raise outcome
    return outcome


@contextmanager
def shared_commits() -> Iterator[None]:
    """Pass the commits resolved so far on to processes that are started in this context."""
    own = {key: f"{c.name}@{c.sha}" for key, c in RESOLVED.items() if isinstance(c, Commit)}
    with environment_variable(COMMITS, json.dumps({**_inherited_commits(), **own})):
        yield


def _inherited_commits() -> dict[str, str]:
    commits: dict[str, str] = json.loads(os.environ.get(COMMITS, "{}"))
    return commits


def request_commit(repo_type: RepoType, name: str, revision: str) -> Commit:
    """Ask the hub for a commit; without an answer, return the commit of the last download with a warning."""
    from huggingface_hub import HfApi

    try:  # the commit at the last download
        cached_sha = (cache_folder(repo_type, name) / "refs" / revision).read_text(encoding="utf-8").strip() or None
    except OSError:
        cached_sha = None
    try:
        connect()
        options: Any = {"repo_type": repo_type, "revision": revision, "timeout": REQUEST_SECONDS}
        info = with_retries(lambda: HfApi().repo_info(name, **options))
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
    return Commit(repo_type, info.id, info.sha)


def cache_folder(repo_type: RepoType, name: str) -> Path:
    """Return the folder of a repository in the cache of ``huggingface_hub``."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{repo_type}s--{name.replace('/', '--')}"


# Files


class _Bar(tqdm):
    """Progress bar that is drawn on a terminal only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": None, "leave": False})


def download(commit: Commit, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files that match ``patterns`` and are not in the cache; return the folder of the commit.

    Args:
        revision: the revision that was resolved to this commit. It is recorded for runs that cannot ask the hub.
    Raises:
        HubError: the files cannot be downloaded.
        OSError: the disk is full.
    """
    from huggingface_hub import snapshot_download

    if (missing := missing_files(commit, patterns)) == []:
        return commit.folder
    connect()
    if (size := sum(file.size for file in missing or [])) >= LARGE_FILES:
        log.info("downloading %s: %.1f MB", commit.name, size / 1e6)
    options: dict[str, Any] = {"repo_type": commit.repo_type, "revision": commit.sha, "tqdm_class": _Bar}
    try:
        folder = with_retries(lambda: snapshot_download(commit.name, allow_patterns=list(patterns), **options))
    except Exception as error:
        if commit.folder.is_dir() and is_offline(error) and listed_files(commit) is None:
            return commit.folder  # downloaded by another program, which stored no list of files
        raise hub_error(error, commit.repo_type, commit.name, revision) from error
    if revision and revision != commit.sha:
        ref = cache_folder(commit.repo_type, commit.name) / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(ref) as new_file:
            new_file.write_text(commit.sha, encoding="utf-8")
    return Path(folder)


def listed_files(commit: Commit) -> list[Any] | None:
    """Return the files of the commit with path and size; None if the cache holds no list of them."""
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
    files, folder = listed_files(commit), commit.folder
    if files is None:
        return None
    return [file for file in files if matching_files([file.path], patterns) and not (folder / file.path).exists()]
