"""Configurations that differ in a few plain values: all that does not depend on these values is resolved once.

OmegaConf parses an interpolation each time it is read, which takes some hundredths of a second for a configuration. A
grid has thousands of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, permutations
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from distill_runner.compose.hydra_private import apply_overrides
from distill_runner.compose.parts import NAMES, PARTS, own_parts, plain, with_complete_stages
from distill_runner.compose.resolvers import KEYS_READ

Path = tuple[str, ...]
_REFERENCE = re.compile(r"\$\{\s*([\w-]+(?:\.[\w-]+)*)\s*([}:\[])")
"""Start of an interpolation: the key or the resolver that it names, and what follows."""
_KEYS_READ = {resolver.__name__: keys for resolver, keys in KEYS_READ.items()} | {"oc.env": ()}


class VaryingConfig:
    """Configuration that is resolved for one choice of plain values after another.

    A value depends on a key if its text names the key, or names a value that depends on it. Text that this module does
    not understand counts as dependent, and so do resolvers that ``KEYS_READ`` does not list.

    Args:
        config: configuration with values for ``keys``; ``resolved`` changes them, so nothing else may use it.
        keys: dotted keys whose values change.
    Raises:
        OmegaConfBaseException: ``config`` cannot be resolved.
    """

    def __init__(self, config: DictConfig, keys: Sequence[str]) -> None:
        self.config = config
        leaves = dict(_leaves((), OmegaConf.to_container(config, resolve=False)))
        dependent = dependent_paths(leaves, [tuple(key.split(".")) for key in keys])
        read = [tuple(key.split(".")) for key in (*PARTS, *NAMES)]
        paths = [path for path in leaves if path in dependent and any(path[: len(part)] == part for part in read)]
        self.nodes = [(_node(config, path[:-1]), path) for path in paths]
        self.base = own_parts(config)

    def resolved(self, overrides: Sequence[Override]) -> dict[str, Any]:
        """Set a plain value for each of ``keys``, and return the ``resolved_parts``, which share what does not vary.

        Raises:
            UserError: a stage inherits from a name that does not exist, or a resolver refuses a value.
            OmegaConfBaseException: a value cannot be resolved.
        """
        apply_overrides(overrides, self.config)
        varying = {path: plain(node[path[-1]]) for node, path in self.nodes}
        return with_complete_stages(_with_values(self.base, varying))


def _with_values(parts: Mapping[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return ``parts`` with other values at some paths; all mappings without such a path are those of ``parts``."""
    result, own = dict(parts), dict[Path, dict[str, Any]]()
    for (*parents, name), value in values.items():
        node = result
        for depth, parent in enumerate(parents, start=1):
            path = tuple(parents[:depth])
            if path not in own:
                own[path] = node[parent] = dict(node[parent])
            node = own[path]
        node[name] = value
    return result


def sets_plain_values(varying: Sequence[Override], values: Sequence[Override]) -> bool:
    """Return whether each of ``varying`` sets one plain value of its own, which no other of ``values`` sets too."""
    keys = [tuple(value.key_or_group.split(".")) for value in values]
    overlap = any(one[: len(other)] == other for one, other in permutations(keys, 2))
    return not overlap and all(
        value.type == OverrideType.CHANGE
        and isinstance(value.value(), int | float | str | None)
        and "${" not in str(value.value())
        for value in varying
    )


def dependent_paths(leaves: Mapping[Path, Any], keys: Sequence[Path]) -> set[Path]:
    """Return ``keys``, and the paths of ``leaves`` whose values depend on one of ``keys``.

    Args:
        leaves: values of a configuration by path, not resolved: numbers, text, lists.
    """
    references = {path: list(_references(value)) for path, value in leaves.items()}
    dependent, prefixes = set[Path](), set[Path]()
    new = {*keys, *(path for path, names in references.items() if None in names)}
    while new:
        dependent |= new
        prefixes |= {prefix for path in new for prefix in _prefixes(path)}
        new = {
            path
            for path, names in references.items()
            if path not in dependent
            and any(name in prefixes or not dependent.isdisjoint(_prefixes(name)) for name in (path, *names) if name)
        }
    return dependent


def _prefixes(path: Path) -> Iterator[Path]:
    return accumulate(((name,) for name in path), lambda prefix, name: (*prefix, *name))


def _references(value: Any) -> Iterator[Path | None]:
    """Yield the paths that the interpolations in a value name; None for one that is not understood."""
    for text in _texts(value):
        matches = _REFERENCE.findall(text)
        if len(matches) != text.count("${"):
            yield None
        for name, end in matches:
            if end != ":":
                yield tuple(name.split("."))
            else:
                yield from (tuple(key.split(".")) for key in _KEYS_READ[name]) if name in _KEYS_READ else (None,)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values in a mapping by path; a mapping whose keys are not all text is a single value."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        for name, part in value.items():
            yield from _leaves((*path, name), part)
    else:
        yield path, value


def _node(config: DictConfig, path: Path) -> DictConfig:
    for name in path:
        config = config[name]
    return config
