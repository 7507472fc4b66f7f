"""Settings that a user chose and that nothing in the run reads."""

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError, suggestion
from distill_runner.compose.command_line import HELP
from distill_runner.compose.folders import choices, configuration_keys, own_folder
from distill_runner.compose.resolvers import INHERITS, TEMPLATE, complete_stages
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stages import STAGE
from distill_runner.training.config import Optim

NOT_OF_STAGES = ("runtime", "store", "tracker", "hydra", "sweep", "frontier", "recipe", "plan", "stage", "seed")
"""Top-level keys that are not read by stages alone."""
DESCRIBING = {"name", "assumptions", "recipe"}
"""Parts of keys that describe a file or name another one."""
NEW_ONLY, COPIED_ONLY = {"architecture"}, {"layers", "labels", "allow_missing"}
"""Options of a model that only one without a source reads, and only one with a source."""
PROBE = "a text that no option holds"


class _Setting(NamedTuple):
    """A value of a key: of an override, which may add the key with ``+``, or in one of the user's own files."""

    key: str
    value: Any
    adds: bool = False
    file: str = ""


def unread_settings(
    config: DictConfig,
    run: RunConfig,
    overrides: Sequence[str],
    choice_of: Mapping[str, str] | None = None,
    is_point: bool = False,
) -> list[str]:
    """Return a line for each override, and for each key of the user's own files, that no stage of the run reads.

    A stage reads a key if another value of the key changes the stage.

    Args:
        overrides: overrides as typed.
        choice_of: the choice in each group, of which those of the user's own folder are searched.
        is_point: whether the run is a point of a sweep, which reads the options of sweeps.
    Raises:
        UserError: an override adds a key, with ``+``, that nothing reads.
    """
    stages, pickled = needed_stages(run), pickle.dumps(config)
    unchanged = _content(config, stages)

    def is_read(key: str) -> bool:
        changed = pickle.loads(pickled)
        node = OmegaConf.select(config, key)
        leaves = [key] if not isinstance(node, DictConfig) else [f"{key}.{leaf}" for leaf, _ in _leaves(node)]
        for leaf in leaves:
            if leaf == key or not DESCRIBING & {*leaf.split(".")}:
                OmegaConf.update(changed, leaf, PROBE, merge=False, force_add=True)
        try:
            return _content(changed, stages) != unchanged
        except (OmegaConfBaseException, UserError, TypeError, ValueError):  # something cannot read the changed value
            return True

    lines = []
    for key, value, adds, file in _settings(config, overrides, choice_of or {}):
        group = key.partition(".")[0]
        is_of_sweep = group in ("sweep", "frontier") and not (is_point or file)
        if (group in NOT_OF_STAGES and not is_of_sweep) or DESCRIBING & {*key.split(".")} or is_read(key):
            continue
        if adds and group != "stages" and key not in configuration_keys():
            raise UserError(key, None, "there is no such key", suggestion(key, configuration_keys()) or HELP)
        hint = f"; did you mean {group}={value}?" if key != group and value in choices(group) else ""
        hint = "; does its first line say # @package _global_?" if group == "experiment" and (adds or file) else hint
        place = f" in {file}" if file else ""
        lines.append(f"{key}={value}{place} has no effect: nothing in this run reads it{hint}")
    return lines


def _settings(config: DictConfig, overrides: Sequence[str], choice_of: Mapping[str, str]) -> Iterator[_Setting]:
    """Yield what overrides set, without those that choose a file or remove a key, and the user's own chosen files."""
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        sets_keys_elsewhere = "." not in key and choices(key) and not OmegaConf.is_dict(config.get(key))
        if equals and "@" not in key and key[0] != "~" and not sets_keys_elsewhere:
            yield _Setting(key, value, adds=override.startswith("+"))
    folder = own_folder()
    for group, name in choice_of.items():
        if folder and (file := folder / group / f"{name}.yaml").is_file():
            text = file.read_text(encoding="utf-8")
            prefix = "" if text.startswith("# @package _global_") else f"{group.replace('/', '.')}."
            content = {key: part for key, part in (yaml.safe_load(text) or {}).items() if key != "defaults"}
            for key, value in _leaves(content):
                yield _Setting(f"{prefix}{key}", value, file=f"{group}/{name}.yaml")


def needed_stages(run: RunConfig) -> dict[str, StageConfig]:
    """Return the stages that the run needs, by name."""
    needed, names = dict[str, StageConfig](), [run.stage]
    while names:
        name = names.pop()
        if name in needed or name not in run.stages:
            continue
        needed[name] = stage = run.stages[name]
        others = stage.prediction_source.sources if stage.prediction_source else []
        sources = [source for source in (stage.model.source, *others) if source]
        names += [source.removeprefix(STAGE) for source in sources if source.startswith(STAGE)]
        names += [stage.teacher] if stage.teacher and stage.method.reads_teacher else []
    return needed


def _content(config: DictConfig, stages: Mapping[str, StageConfig]) -> dict[str, Any]:
    """Return the configuration of stages with all that they inherit, without what they do not read."""
    names, bases = [*stages], dict[str, Any]()
    while names:
        name = names.pop()
        if name != TEMPLATE and name not in bases:
            bases[name] = OmegaConf.to_container(config.stages[name], resolve=True)
            names += [bases[name][INHERITS]] if bases[name].get(INHERITS) else []
    parts: dict[str, Any] = {"stages": bases, "teacher": {"source": config.teacher.source}}
    if any(stage.get(INHERITS) == TEMPLATE for stage in bases.values()):
        parts[TEMPLATE] = OmegaConf.to_container(config[TEMPLATE], resolve=True)
    complete = complete_stages(parts)
    for name, typed in stages.items():
        unread: dict[str, Collection[str]] = {
            "optim": Optim.unread_options(typed.optim.name, typed.optim.schedule),
            "model": NEW_ONLY if typed.model.source else COPIED_ONLY,
            "task": {"epochs", *(typed.task.ignored_options if typed.task else ())},  # optim refers to its epochs
        }
        stage = {**complete[name]}
        for part in unread:
            if isinstance(stage.get(part), Mapping):
                stage[part] = {key: value for key, value in stage[part].items() if key not in unread[part]}
        if typed.task is None or not typed.task.is_endless(None):
            stage.pop("views", None)  # versions of images that are changed at random
        method = stage.get("method")
        if isinstance(method, dict) and isinstance(method.get("terms"), Mapping):
            terms = {name: term for name, term in method["terms"].items() if name in typed.method.terms}
            stage["method"] = {**method, "terms": terms}
        complete[name] = stage
    return {name: complete[name] for name in stages}


def _leaves(node: Mapping[Any, Any] | DictConfig) -> Iterator[tuple[str, Any]]:
    plain: Any = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else node
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value))
        else:
            yield str(key), value
