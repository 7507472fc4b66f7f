"""Large files of the hub, fetched so that a later process goes on where an earlier one was ended.

``huggingface_hub`` drops what it has of a file when it is interrupted. Here that stays beside the file's place in the
cache, as ``<checksum>.partial``. A file that is whole ``huggingface_hub`` finds there, and fetches nothing.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

LARGE = 10_000_000
"""Bytes. Smaller files begin again."""


def fetch_large(urls: Iterable[str], blobs: Path, bar: Any) -> None:
    """Fetch files that are not there.

    Args:
        urls: of the files. Those that the hub keeps no checksum of are left out.
        blobs: the folder of the cache that has the contents.
        bar: class of the bar to report to.
    Raises:
        OSError: the network fails, the disk is full, or a file is not what the hub says it is.
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
                raise OSError(f"{url.rpartition('/')[2]} has arrived damaged")
            partial.rename(blob)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
