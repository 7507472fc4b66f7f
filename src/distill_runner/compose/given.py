"""Checks of the overrides and of a user's own configuration files, before Hydra composes them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from distill_runner.common.errors import UserError, first_line, nearest
from distill_runner.compose.explain import known_keys
from distill_runner.compose.folders import choices

TYPED = ("stages", "runtime", "store", "tracker", "task", "corpus", "transfer", "method", "optim", "hydra", "params")
"""Top-level keys below which a schema, or Hydra, refuses unknown keys."""
NODES = 100_000
"""Maximum number of values of a file with its aliases expanded: more are a mistake, or meant to fill the memory."""


def check_given(overrides: Sequence[str]) -> None:
    """Check that the overrides add no key that nothing reads, and choose one name in each group.

    Raises:
        UserError: an override adds an unknown key, or chooses several names.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+")
        if value.startswith("[") and choices(name):
            remedy = f"One run for each name: distill-run -m {name}={value.strip('[]')}"
            raise UserError(name, value, "takes one name of the group, not several", remedy)
        if key.startswith("+") and name.split(".")[0] not in TYPED and ".optim." not in name and not choices(name):
            keys = {known for known, _ in known_keys()}
            if name not in keys:
                raise UserError(name, None, "there is no such key", nearest(name, keys) or "See distill-run --help.")


def check_files(folder: Path) -> None:
    """Check that the configuration files in a user's own folder can be read, and stay small with aliases expanded.

    Raises:
        UserError: a file cannot be read, or comes to more than ``NODES`` values.
    """
    for file in sorted(folder.rglob("*.yaml")):
        try:
            text = file.read_text(encoding="utf-8")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if not isinstance(root, yaml.MappingNode | None):
                raise UserError(str(file), None, "must be a mapping of keys to values", "For example: name: mine")
            for node in _nodes(root):
                _check_node(file, node)
            if _size(root, {}) > NODES:
                raise UserError(
                    str(file),
                    None,
                    f"has more than {NODES} values, counting aliases as often as they are used",
                    "Write it without so many aliases.",
                )
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = f"cannot be read: {error.problem or error.context}"
            raise UserError(f"{file}, line {line}", None, problem, "Indent YAML with spaces, not with tabs.") from error
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            problem = f"is not valid YAML: {first_line(error)[:100]}"
            raise UserError(str(file), None, problem) from error


def _check_node(file: Path, node: Any) -> None:
    place = f"{file}, line {node.start_mark.line + 1}"
    if node.tag.startswith("tag:yaml.org,2002:python") or node.tag.startswith("!"):
        raise UserError(place, None, f"has the tag {node.tag}, which is not read", "Write plain values.")
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:
        try:
            OmegaConf.create([node.value])
        except GrammarParseError as error:
            raise UserError(place, None, f"'{node.value}' cannot be read", "A reference is ${key}.") from error
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(place, None, f"has the key '{twice[0]}' twice", "Keep one.")


def _nodes(node: Any) -> Iterator[Any]:
    """Yield ``node`` and all nodes below it, each once even if several aliases refer to it."""
    seen, waiting = set[int](), [node]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting += _below(node)


def _below(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _size(node: Any, known: dict[int, int]) -> int:
    """Return the number of values at ``node`` and below with all aliases expanded."""
    if id(node) not in known:
        known[id(node)] = NODES  # counts if the node contains itself
        known[id(node)] = 1 + sum(_size(part, known) for part in _below(node))
    return known[id(node)]
