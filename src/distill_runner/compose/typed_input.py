"""Checks of what the user typed, before Hydra composes it: the overrides, and the user's own configuration files."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from distill_runner.common.errors import UserError, first_line, suggestion
from distill_runner.compose.explain import HELP, configuration_keys
from distill_runner.compose.folders import choices

CHECKED = ("stages", "runtime", "store", "tracker", "task", "corpus", "transfer", "method", "optim", "hydra", "params")
"""Top-level keys below which a schema, or Hydra, refuses unknown keys."""


CODE_KEYS = ("_target_", "()", "class", "searchpath", "env_set", "setup")
"""Keys by which Hydra, ``logging`` or a job's script call what a file names, or read files that are not checked."""
MAKERS_OF_KEYS = ("_target_", "oc.create", "oc.decode")
"""Parts of a value that could make such keys."""
OBJECTS, SAFE_OBJECTS = "ext://", "ext://sys.std"
"""Beginning of values that ``logging`` imports, and of those that are only standard output and error."""
PLUGINS = "hydra_plugins."
"""Beginning of the classes of installed launchers and sweepers, which a file below ``hydra/`` may choose."""


def check_overrides(overrides: Sequence[str]) -> None:
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
        is_new = key.startswith("+")
        if is_new and name.split(".")[0] not in CHECKED and ".optim." not in name and not choices(name):
            keys = {key for key, _ in configuration_keys()}
            if name not in keys:
                raise UserError(name, None, "there is no such key", suggestion(name, keys) or HELP)


def check_files(folder: Path) -> None:
    """Check that the configuration files in a user's own folder can be read.

    Raises:
        UserError: a file cannot be read.
    """
    for file in sorted(_yaml_files(folder)):
        try:
            root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            if not isinstance(root, yaml.MappingNode | None):
                raise UserError(str(file), None, "must be a mapping of keys to values", "For example: name: mine")
            for node in _nodes(root):
                _check_node(file, node)
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
    if isinstance(node, yaml.ScalarNode) and OBJECTS in node.value and not node.value.startswith(SAFE_OBJECTS):
        _refuse_code(place, OBJECTS)
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:
        for part in MAKERS_OF_KEYS:
            if part in node.value:
                _refuse_code(place, part)
        try:
            OmegaConf.create([node.value])
        except GrammarParseError as error:
            raise UserError(place, None, f"'{node.value}' cannot be read", "A reference is ${key}.") from error
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise UserError(place, None, f"has the key '{duplicates[0]}' twice", "Keep one.")
        for key, value in node.value:
            if key.value in CODE_KEYS and not _is_harmless(file, key.value, value):
                _refuse_code(place, key.value)


def _is_harmless(file: Path, key: str, value: Any) -> bool:
    """Return whether an entry with a key of ``CODE_KEYS`` calls only what is installed for it."""
    is_below_hydra = file.parent.name in ("launcher", "sweeper") and file.parent.parent.name == "hydra"
    if key == "setup":
        return is_below_hydra
    if not isinstance(value, yaml.ScalarNode):
        return key == "class"  # a name of a part; logging wants a text
    if key == "class":
        return value.value.startswith("logging.")
    return is_below_hydra and value.value.startswith(PLUGINS)


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Yield the YAML files of a folder, and of the folders that links in it lead to: Hydra reads these too."""
    visited = set[str]()
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(path, name)) not in visited]
        visited |= {os.path.realpath(os.path.join(path, name)) for name in folders}
        yield from (Path(path, name) for name in files if name.endswith(".yaml"))


def _refuse_code(place: str, what: str) -> None:
    remedy = "Files of a configuration run no code; on the command line, hydra.callbacks and the like still can."
    raise UserError(place, None, f"has {what}, by which Hydra would call code that the file names", remedy)


def _nodes(root: Any) -> Iterator[Any]:
    """Yield ``root`` and all nodes below it, each once even if several aliases refer to it."""
    visited, stack = set[int](), [root]
    while stack:
        node = stack.pop()
        if node is None or id(node) in visited:
            continue
        visited.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            stack += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value
