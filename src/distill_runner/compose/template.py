"""Resolves configurations that differ in a few values: all that does not depend on these values is resolved once.

OmegaConf takes a tenth of a second to resolve the interpolations of a configuration, and a grid has thousands of them.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distill_runner.compose.composed import completed
from distill_runner.compose.resolvers import PURE, READS

Path = tuple[str, ...]


class Template:
    """Configuration that is resolved for one set of plain values of ``keys`` after another.

    Args:
        config: configuration with values for ``keys``; the caller sets new values in it before ``resolved``.
        parts: top-level keys of ``config`` that are resolved.
        keys: dotted keys whose values change.
    Raises:
        OmegaConfBaseException: ``config`` cannot be resolved.
    """

    def __init__(self, config: DictConfig, parts: Sequence[str], keys: Sequence[str]) -> None:
        self.config, self.keys = config, [tuple(key.split(".")) for key in keys]
        raw: Any = OmegaConf.to_container(config, resolve=False)
        self.raw: Mapping[str, Any] = raw
        self.known: dict[Path, bool] = {}
        self.changing = [path for part in parts for path in self._changing((part,), self.raw.get(part))]
        self.places = [(_inside(config, path), path) for path in self.changing]
        self.base = pickle.dumps({part: _plain(config[part]) for part in parts if part in config})

    def resolved(self) -> dict[str, Any]:
        """Return the resolved parts for the current values in ``config``, with all that the stages inherit.

        Raises:
            UserError: a stage inherits from a name that does not exist.
        """
        found: dict[str, Any] = pickle.loads(self.base)
        for raw, (*parents, name) in self.places:
            place = found
            for parent in parents:
                place = place[parent]
            place[name] = _plain(raw[name])
        return {**found, "stages": completed(found)}

    def _changing(self, path: Path, raw: Any) -> Iterator[Path]:
        """Yield the paths at ``path`` or below whose values depend on one of ``keys``."""
        if isinstance(raw, Mapping) and not any(path == key for key in self.keys):
            for name, value in raw.items():
                yield from self._changing((*path, name), value)
        elif self._depends(path):
            yield path

    def _depends(self, path: Path) -> bool:
        """Return whether the value at ``path`` is one of ``keys``, contains one, or is computed from one."""
        if any(path[: len(key)] == key or key[: len(path)] == path for key in self.keys):
            return True
        if path not in self.known:
            self.known[path] = False  # a circular reference alone is no dependence
            self.known[path] = any(map(self._depends_on, self._texts(path)))
        return self.known[path]

    def _depends_on(self, text: str) -> bool:
        read = re.findall(r"\$\{\s*([\w.-]+)\s*(:?)", text)
        if "${" in text and (len(read) != text.count("${") or "${." in text):
            return True  # an interpolation that is not understood here
        for name, colon in read:
            if not colon:
                if self._depends(tuple(name.split("."))):
                    return True
            elif name in READS:
                if any(self._depends(tuple(key.split("."))) for key in READS[name]):
                    return True
            elif name not in PURE:
                return True
        return False

    def _texts(self, path: Path) -> Iterator[str]:
        """Yield all text at ``path`` or below; an interpolation on the way to ``path`` is yielded instead."""
        node: Any = self.raw
        for name in path:
            if isinstance(node, str):
                break
            node = node.get(name) if isinstance(node, Mapping) else None
        yield from _written(node)


def _inside(config: DictConfig, path: Path) -> Any:
    """Return the node that contains the value at ``path``."""
    node: Any = config
    for name in path[:-1]:
        node = node[name]
    return node


def _written(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _written(value)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
