"""Download of large files from the hub that a later process resumes where an earlier one ended.

``huggingface_hub`` drops an incomplete file when it is interrupted. This module keeps the incomplete file in the cache
as ``<checksum>.partial``, next to its final place. ``huggingface_hub`` finds a complete file in the cache and does not
download it again.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

LARGE = 10_000_000
"""Size in bytes from which a download is resumed; smaller files start again."""


def fetch_large(urls: Iterable[str], blobs: Path, bar: Any) -> None:
    """Download the files that are not in the cache.

    Args:
        urls: the URLs of the files. Files for which the hub has no SHA-256 checksum are skipped.
        blobs: the folder of the cache that holds file contents.
        bar: the class of the progress bar to report to.
    Raises:
        HTTPError: the network or the hub fails (``huggingface_hub.utils.httpx``).
        OSError: the disk is full, or a downloaded file has a wrong checksum.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    headers = build_hf_headers()
    blobs.mkdir(parents=True, exist_ok=True)
    for url in urls:
        described = get_hf_file_metadata(url, headers=headers)
        checksum = described.etag or ""
        blob, partial = blobs / checksum, blobs / f"{checksum}.partial"
        if not re.fullmatch("[0-9a-f]{64}", checksum):
            continue
        with FileLock(f"{partial}.lock"):
            if blob.exists():
                continue
            with partial.open("ab") as stream:
                options = {"headers": headers, "expected_size": described.size, "tqdm_class": bar}
                http_get(url, stream, resume_size=stream.tell(), **options)
            if _sha256(partial) != checksum:
                partial.unlink()
                raise OSError(f"{url.rpartition('/')[2]} was damaged during the download")
            partial.rename(blob)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
