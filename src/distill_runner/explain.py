"""Errors of Hydra and OmegaConf in a user's words: the key, the value, the remedy."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill_runner.errors import UserError


def explain(error: BaseException, config_folder: Path) -> str:
    """One or two lines for an error raised while a configuration was composed or resolved."""
    for cause in _chain(error):
        if isinstance(cause, UserError):
            return str(cause)
    text = str(error)
    if match := re.search(r"Could not find '([^/']+)/([^']+)'|Could not load '([^/']+)/([^']+)'", text):
        group, name = match[1] or match[3], match[2] or match[4]
        return str(UserError(group, name, "there is no such choice", _near(name, _choices(config_folder / group))))
    if match := re.search(r"Could not override '([^']+)'", text):
        keys = list(_keys(config_folder))
        group_or_key = match[1].split("@")[0]
        return str(UserError(group_or_key, None, "there is no such key or group", _near(group_or_key, keys)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n  ".join(lines[:2]) or type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(known)}." if len(known) <= 20 else hint.strip() or "See distill-run --help."


def _choices(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def _keys(config_folder: Path) -> Iterator[str]:
    """Names of groups, and dotted keys of the root and of every group's files."""
    from omegaconf import OmegaConf

    for file in sorted(config_folder.rglob("*.yaml")):
        group = "" if file.parent == config_folder else f"{file.parent.name}."
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        if group:
            yield group[:-1]
        if isinstance(content, dict) and "hydra" not in file.parts[-3:]:
            yield from (f"{group}{key}" for key in _flat(content))


def _flat(node: Any, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
