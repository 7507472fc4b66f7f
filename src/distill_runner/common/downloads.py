"""Files of a commit of the Hugging Face hub, in the cache on this machine.

Files of the commit that are in the cache cost no request. The download of a large file resumes where it broke off.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from distill_runner.common.files import atomic_replacement, file_sha256
from distill_runner.common.hub import Commit, HubError, cache_folder, connect, hub_error, is_offline, with_retries

log = logging.getLogger(__name__)

LARGE_FILE = 10_000_000
"""Size in bytes from which a later process resumes a download; smaller files start again."""


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
    size, started = sum(file.size for file in missing or []), time.monotonic()
    cache = cache_folder(commit.repo_type, commit.name)
    if cache.exists() and size > (free := disk_usage(cache).free):
        problem = f"needs {size / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {cache.parent}"
        raise HubError(problem, "Free some space, or set HF_HOME to a folder on a larger disk.", temporary=True)
    if size >= LARGE_FILE:
        log.info("downloading %s: %.1f MB", commit.name, size / 1e6)
    try:
        for file in missing or []:
            if file.size >= LARGE_FILE:
                _download_large_file(commit, file.path)
        options: dict[str, Any] = {"repo_type": commit.repo_type, "revision": commit.sha, "tqdm_class": _NoBar}
        folder = with_retries(lambda: snapshot_download(commit.name, allow_patterns=list(patterns), **options))
    except KeyboardInterrupt:
        log.warning("the files downloaded so far are kept in %s: repeat the command to resume", cache)
        raise
    except Exception as error:
        if commit.folder.is_dir() and is_offline(error) and file_ids(commit) is None:
            return commit.folder  # downloaded by another program, which stored no list of files
        raise hub_error(error, commit.repo_type, commit.name, revision) from error
    if size >= LARGE_FILE:
        log.info("downloaded %s in %.0f s", commit.name, time.monotonic() - started)
    if revision and revision != commit.sha:
        ref = cache / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(ref) as new_file:
            new_file.write_text(commit.sha, encoding="utf-8")
    return Path(folder)


class _NoBar(tqdm):
    """Progress bar of ``snapshot_download`` that draws nothing: large files have bars of their own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


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

    url = hf_hub_url(commit.name, path, repo_type=commit.repo_type, revision=commit.sha)
    headers = build_hf_headers()
    metadata = with_retries(lambda: get_hf_file_metadata(url, headers=headers))
    checksum = metadata.etag or ""
    if not re.fullmatch("[0-9a-f]{64}", checksum):
        return
    blobs = cache_folder(commit.repo_type, commit.name) / "blobs"
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
        with_retries(resume, lambda: part.stat().st_size if part.exists() else 0)
        if file_sha256(part) != checksum:
            part.unlink()
            raise OSError(f"{path} was damaged during the download")
        part.rename(blob)


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
    files, folder = _listed_files(commit), commit.folder
    if files is None:
        return None
    return [file for file in files if matching_files([file.path], patterns) and not (folder / file.path).exists()]
