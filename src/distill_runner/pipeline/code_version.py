"""Version of the code that computes stages, which is part of their keys.

``code_version.json`` records a number and the hash of the source that it stands for. As long as the source has this
hash, keys hold the number; edited code puts its own hash into them, so that artifacts of other code are not taken for
its own.

    python -m distill_runner.pipeline.code_version --same   # record the source again: it computes the same
    python -m distill_runner.pipeline.code_version --next   # record it under the next number: artifacts are rebuilt
"""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = (
    *("methods", "models", "training", "tasks", "datasets", "common/seeds.py"),
    *("pipeline/build.py", "pipeline/inputs.py", "pipeline/stages.py", "pipeline/targets.py"),
)
"""Packages and modules that compute stages, or say what determines them."""
ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("code_version.json")


def source_hash(root: Path = ROOT) -> str:
    """Return a hash of names and bytes of the source files that compute stages."""
    total = hashlib.sha256()
    for file in sorted(file for source in SOURCES for file in [root / source, *(root / source).rglob("*.py")]):
        if file.is_file():
            total.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


@cache
def code_version() -> int | str:
    """Return the recorded number if the source is what was recorded, else its hash."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return int(record["version"]) if record["sha256"] == (own := source_hash()) else own


if __name__ == "__main__":
    if sys.argv[1:] not in (["--same"], ["--next"]):
        sys.exit(__doc__)
    number = json.loads(RECORD.read_text(encoding="utf-8"))["version"] + (sys.argv[1] == "--next")
    RECORD.write_text(json.dumps({"version": number, "sha256": source_hash()}) + "\n", encoding="utf-8")
    print(f"recorded version {number}")
