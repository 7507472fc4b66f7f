"""Keys of the files beside a model's weights: ``metadata.yaml`` says which are read, harmless, refused or named."""

import json
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common.errors import UserError

KEYS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("metadata.yaml").read_text(encoding="utf-8"))
"""What becomes of each key, by file and status."""
REFUSED, OF_ENCODERS, REPORTED = "refused", "refused of encoders", "named"
MODULES, SETTINGS, CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
MAX_VALUE = 40
"""Characters of a value in messages."""


def status_of(kind: str, key: str) -> tuple[str, list[Any]]:
    """Return the status of a key, and the values that are assumed; a key in no list is ``named`` whatever its value.

    Args:
        kind: file of the table, such as ``config.json``.
    """
    for status, entries in KEYS[kind].items():
        if status in (REFUSED, OF_ENCODERS, REPORTED):
            if key in entries:
                return status, entries[key]
        elif any(fnmatch(key, pattern) for patterns in entries.values() for pattern in patterns):
            return status, []
    return REPORTED, []


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; an empty object without the file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def unread_keys(content: Any, kind: str, name: str, fields: Collection[str] = (), is_encoder: bool = True) -> list[str]:
    """Return the keys of a file, with their values, that are not read and may change what other programs compute.

    Args:
        content: content of the file.
        kind: as in ``status_of``.
        name: what the user typed for the model.
        fields: further keys that are read: the fields of the configuration's class.
        is_encoder: whether the model is a bidirectional encoder.
    Raises:
        UserError: a key has a value that would be read as another one.
    """
    unread = []
    for key, value in content.items():
        status, assumed = status_of(kind, key)
        is_field = key in fields and (status, assumed) == (REPORTED, [])
        if value in assumed or status in ("read", "harmless") or is_field:
            continue
        text = f"{key}={json.dumps(value, ensure_ascii=False)[:MAX_VALUE]}"
        if status == REFUSED or (status == OF_ENCODERS and is_encoder):
            remedy = f"Where its outputs are right without it, set it to {json.dumps(assumed[0])} there."
            raise UserError(".model.source", name, f"{kind} has {text}, which is not read", remedy)
        if status == REPORTED:
            unread.append(f"{kind.partition('/')[0] if '/' in kind else kind}: {text}")
    return unread
