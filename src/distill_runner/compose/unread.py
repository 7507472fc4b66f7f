"""Settings that a user chose and that nothing in the run reads."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from distill_runner.compose.folders import choices, own_folder
from distill_runner.compose.resolvers import INHERITS, inherit_stages
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.config import StageConfig
from distill_runner.training.config import Optim

ELSEWHERE = (
    *("runtime", "store", "tracker", "hydra", "sweep", "frontier", "params", "recipe", "plan", "stage", "seed"),
    "template",
)
"""Top-level keys that are read by more than the stages, or by name."""
DESCRIBING = {"name", "assumptions", "recipe", "version"}
"""Parts of keys that describe a file or name another one."""
NEW_ONLY, COPIED_ONLY = {"architecture"}, {"layers", "labels", "allow_missing"}
"""Options of a model that only one without a source reads, and only one with a source."""
STAGE = "stage:"
REFERENCE = re.compile(r"\$\{([\w.]+)\}|oc\.select:\s*([\w.]+)")


class ReadKeys:
    """Keys of a configuration that the stages of a run read, directly or through references."""

    def __init__(self, config: DictConfig, run: RunConfig) -> None:
        self.config, self.run = config, run

    def __contains__(self, key: str) -> bool:
        """Whether a stage reads ``key``, or a key below it."""
        first, _, rest = key.partition(".")
        if first == "stages":
            name, _, inner = rest.partition(".")
            return name in self._stages and not self._is_ignored(name, inner)
        return any(path == key or path.startswith(f"{key}.") for path in self._paths)

    def _is_ignored(self, name: str, key: str) -> bool:
        """Whether a stage that the run needs has no use for a key below it, such as ``optim.momentum`` of AdamW."""
        if (stage := self._needed.get(name)) is None:
            return False
        part, _, option = key.partition(".")
        unread = {
            "optim": Optim.unread_options(stage.optim.name, stage.optim.schedule),
            "model": NEW_ONLY if stage.model.source else COPIED_ONLY,
            "task": stage.task.ignored_options if stage.task else frozenset(),
        }
        return option.partition(".")[0] in unread.get(part, ())

    @cached_property
    def _raw(self) -> dict[str, Any]:
        raw: Any = OmegaConf.to_container(self.config, resolve=False)
        return {str(key): value for key, value in raw.items()}

    @cached_property
    def _needed(self) -> dict[str, StageConfig]:
        """The stages that the run needs, by name."""
        needed, names = dict[str, StageConfig](), [self.run.stage]
        while names:
            name = names.pop()
            if name in needed or name not in self.run.stages:
                continue
            needed[name] = stage = self.run.stages[name]
            others = stage.prediction_source.sources if stage.prediction_source else []
            sources = [source for source in (stage.model.source, *others) if source]
            names += [source.removeprefix(STAGE) for source in sources if source.startswith(STAGE)]
            names += [stage.teacher] if stage.teacher and stage.method.reads_teacher else []
        return needed

    @cached_property
    def _stages(self) -> set[str]:
        """Names of the stages that the run needs, and of those that they inherit from."""
        names, open_names = set[str](), [*self._needed]
        while open_names:
            name = open_names.pop()
            names.add(name)
            base = (self._raw["stages"].get(name) or {}).get(INHERITS)
            open_names += [base] if base and base not in names else []
        return names

    @cached_property
    def _paths(self) -> set[str]:
        paths = set[str]()
        inherited = inherit_stages(self._raw)
        for name, typed in self._needed.items():
            stage = inherited[name]
            method = stage["method"] if isinstance(stage["method"], Mapping) else {"terms": stage["method"]}
            dropped = {name for name in self._children(method.get("terms")) if name not in typed.method.terms}
            self._follow(method.get("terms"), paths, dropped)
            self._follow(stage.get("optim"), paths, Optim.unread_options(typed.optim.name, typed.optim.schedule))
            self._follow(stage.get("model"), paths, NEW_ONLY if typed.model.source else COPIED_ONLY)
            self._follow({key: part for key, part in method.items() if key != "terms"}, paths)
            self._follow(stage.get("task"), paths, typed.task.ignored_options if typed.task else ())
            followed = ("model", "method", "optim", "task")
            self._follow({key: part for key, part in stage.items() if key not in followed}, paths)
            if typed.model.source is not None and typed.model.source == self.run.teacher.source:
                self._follow("${teacher.source}", paths)
        return paths

    def _children(self, node: Any) -> Mapping[str, Any]:
        """Return the entries of a mapping, or of the mapping that ``node`` refers to."""
        if isinstance(node, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", node)):
            node = _select(self._raw, match[1])
        return node if isinstance(node, Mapping) else {}

    def _follow(self, node: Any, paths: set[str], without: Collection[str] = ()) -> None:
        """Add to ``paths`` all keys that ``node`` refers to, except the entries ``without`` of its own mapping."""
        if isinstance(node, Mapping):
            for name, part in node.items():
                if name not in without:
                    self._follow(part, paths)
        elif isinstance(node, list):
            for part in node:
                self._follow(part, paths)
        elif isinstance(node, str):
            for match in REFERENCE.finditer(node):
                self._add(match[1] or match[2], paths, without)

    def _add(self, path: str, paths: set[str], without: Collection[str] = ()) -> None:
        node = _select(self._raw, path)
        if isinstance(node, Mapping) and node:
            for name in node:
                if name not in without:
                    self._add(f"{path}.{name}", paths)
        elif path not in paths:
            paths.add(path)
            self._follow(node, paths)


def unread_settings(
    config: DictConfig, run: RunConfig, overrides: Sequence[str], choice_of: Mapping[str, str] | None = None
) -> list[str]:
    """Return a line for each override, and for each key of the user's own files, that no stage of the run reads.

    Args:
        overrides: overrides as typed.
        choice_of: the choice in each group, of which those of the user's own folder are searched.
    """
    read_keys, lines = ReadKeys(config, run), []
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        group, dot, _ = key.partition(".")
        if not equals or "@" in key or group in ELSEWHERE or DESCRIBING & {*key.split(".")}:
            continue
        is_choice = not dot and bool(choices(key))
        if is_choice and not isinstance(config.get(key), Mapping | DictConfig):  # its file sets keys elsewhere
            continue
        if key not in read_keys:
            lines.append(f"{key}={value} {_no_effect(group, '' if is_choice else value)}")
    for file, key, value in _own_settings(choice_of or {}):
        group = key.partition(".")[0]
        if group not in ELSEWHERE and key not in read_keys:
            lines.append(f"{key}={value} in {file} {_no_effect(group, str(value))}")
    return lines


def _no_effect(group: str, value: str) -> str:
    hint = f"; did you mean {group}={value}?" if value in choices(group) else ""
    return f"has no effect: nothing in this run reads it{hint}"


def _select(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _own_settings(choice_of: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield file, key and value of the settings in those of the user's own files that the run has chosen."""
    folder, visited = own_folder(), set[Path]()
    files = [(group, folder / group / f"{name}.yaml") for group, name in choice_of.items()] if folder else []
    while files:
        group, file = files.pop()
        if file in visited or not file.is_file() or folder is None:
            continue
        visited.add(file)
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        if not isinstance(content, Mapping):
            continue
        for name in content.get("defaults") or ():
            if isinstance(name, str) and name != "_self_":
                files.append((group, (folder if name.startswith("/") else file.parent) / f"{name.lstrip('/')}.yaml"))
        prefix = "" if text.startswith("# @package _global_") else f"{group.replace('/', '.')}."
        for key, value in _flat({key: value for key, value in content.items() if key != "defaults"}):
            if not DESCRIBING & {*f"{prefix}{key}".split(".")}:
                yield file.relative_to(folder).as_posix(), f"{prefix}{key}", value


def _flat(node: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _flat(value))
        else:
            yield str(key), value
