"""What leaves this machine: model cards and tracked values, without its folders, its user and its tokens."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN")
"""Environment variables that hold secrets."""
MIN_TOKEN = 8
"""Characters of the shortest secret; a shorter value may be a word."""
PATH = re.compile(r"(?<![\w:./~])(?:file://)?(?:~\w*|\.{1,2})?/(?:[^\s'\",;\]/]+/)*([^\s'\",;\]/]+)")
"""A path on this machine; the group is the last name of the path."""


def without_paths(text: str) -> str:
    """Return the text with each path shortened to its last name, since folders of this machine mean nothing to others.

    The home folder becomes ``~``, and secrets become ``***``.
    """
    for name in TOKENS:
        if len(token := os.environ.get(name, "")) >= MIN_TOKEN:
            text = text.replace(token, "***")
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return PATH.sub(r"\1", text)


def shareable(value: Any) -> Any:
    """Return a value, or a nested one, with ``without_paths`` applied to every text and to every key in it."""
    if isinstance(value, Mapping):
        return {shareable(key): shareable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(part) for part in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        if os.path.isabs(value) and "\n" not in value and value != os.path.expanduser("~"):
            return without_paths(os.path.basename(value.rstrip("/")))  # also if it has blanks
        return without_paths(value)
    return value
