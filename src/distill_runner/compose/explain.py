"""Explain errors to the user: the key as it is typed, its value, the remedy."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from distill_runner.common.errors import UserError, causes, suggestion
from distill_runner.common.files import resource_error
from distill_runner.common.hub import is_hub_id
from distill_runner.compose.folders import all_folders, choices
from distill_runner.compose.resolvers import inherit_stages

HELP = "See distill-run --help."
SOURCES = {
    "task": "task=custom task.dataset",
    "teacher": "teacher=base teacher.source",
    "student": "student=pretrained student.init.source",
}
"""Group -> the overrides whose last one takes a folder or an id of the hub in place of a name."""
OTHER_WORDS = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "optim.epochs",
    "num_epochs": "optim.epochs",
    "per_device_train_batch_size": "optim.batch_size",
    "train_batch_size": "optim.batch_size",
    "gradient_accumulation_steps": "optim.accumulation",
    "max_grad_norm": "optim.clip",
    "warmup_ratio": "optim.warmup",
    "lr_scheduler_type": "optim.schedule",
    "max_seq_length": "task.max_length",
    "model_name_or_path": "teacher.source",
    "output_dir": "hydra.run.dir",
    "fp16": "runtime.precision",
    "bf16": "runtime.precision",
    "batch": "optim.batch_size",
    "lr": "optim.lr",
    "epochs": "optim.epochs",
    "steps": "optim.max_steps",
    "temperature": "loss.temperature",
    "alpha": "loss.eta",
    "model": "student",
    "student_model": "student",
    "teacher_model": "teacher",
    "precision": "runtime.precision",
    "device": "runtime.device",
    "no_cuda": "runtime.device",
    "logging_steps": "runtime.log_every",
    "report_to": "tracker",
    "train_file": "task.dataset",
    "dataset_name": "task.dataset",
    "task_name": "task",
}
"""Options of other tools, and the option that means the same here."""
COMPOSITION_ERRORS = (UserError, HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError)
"""Exceptions that are raised if a configuration cannot be composed."""


def explain(error: BaseException, overrides: Sequence[str]) -> UserError | None:
    """Return the user's mistake that made Hydra raise ``error`` while composing; None if there is no such mistake."""
    for cause in causes(error):
        if isinstance(cause, UserError):
            return cause
    if full := resource_error(error):
        return full
    if isinstance(error, RecursionError):
        remedy = "Look at the defaults and interpolations of your own files."
        return UserError("configuration", None, "its parts refer to each other in a circle", remedy)
    text = str(error)
    if match := re.search(r"Unknown plugin class : 'hydra_plugins\.hydra_(\w+)_(launcher|sweeper)\.", text):
        name, group = match.groups()
        value = next((part.partition("=")[2] for part in overrides if part.startswith(f"hydra/{group}=")), name)
        remedy = f"pip install hydra-{name}-{group}"
        return UserError(f"hydra/{group}", value, "needs a package that is not installed", remedy)
    if not isinstance(error, COMPOSITION_ERRORS):
        return None
    if isinstance(error, OverrideParseException):
        return _cannot_parse(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file, error.options or [], overrides)
    if text.startswith("Config group override must be"):
        pairs = (override.partition("=") for override in overrides)
        unknown = [f"{key}/{name}" for key, _, name in pairs if name not in (choices(key) or [name])]
        return _no_such_choice(unknown[0] if unknown else "", [], overrides)
    if match := re.search(r"Ambiguous value for argument '([^=']+)=(.*)'\n", text):
        key, values = match.groups()
        remedy = f"One run for each value: distill-run -m {key}={values}. One list: {key}=[{values}]"
        return UserError(key, values, "has several values", remedy)
    if match := re.search(r"(?:Could not override|Could not delete from config\.|Interpolation key) '([^'@]+)", text):
        return _no_such_key(match[1])
    if isinstance(error, OSError) and error.filename:
        remedy = "Work in a folder that you may write to, or set hydra.run.dir and store.dir."
        return UserError(str(error.filename), None, error.strerror or "cannot be used", remedy)
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return UserError(error.full_key, None, first)
    return UserError("configuration", None, first, rest[0] if rest else "")


def user_facing_error(
    error: UserError | OmegaConfBaseException, config: DictConfig, overrides: Sequence[str]
) -> Exception:
    """Return an error in a composed configuration, for the key that the user sets."""
    if isinstance(error, UserError):
        return _at_source_key(error, config)
    return explain(error, overrides) or error


def _at_source_key(error: UserError, config: DictConfig) -> UserError:
    """Follow interpolations back to the key that the value comes from, and return the error for that key."""
    if not error.key.startswith("stages."):
        return error
    raw_settings: Any = OmegaConf.to_container(config, resolve=False)
    plain, path = {**raw_settings, "stages": inherit_stages(raw_settings)}, list[str]()
    for part in error.key.split("."):
        path.append(part)
        while (raw := _select(plain, path)) and isinstance(raw, str) and re.fullmatch(r"\$\{.*\}", raw):
            sources = re.findall(r"\$\{([\w.]+)\}", raw)
            if not sources:
                break
            # If there are several keys, as in ${choose:${a},name,${b}}, take the key that has the value.
            source = next((key for key in sources if OmegaConf.select(config, key) == error.value), sources[0])
            path = source.split(".")
    if OmegaConf.select(config, ".".join(path)) == "pretrained":
        path = ["teacher", "source"]
    return error.with_key(".".join(path))


def _select(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _cannot_parse(override: str) -> UserError:
    key, equals, value = override.partition("=")
    if not equals:
        return UserError(override, None, "is not of the form <key>=<value>", HELP)
    remedy = f"Brackets and quotes must come in pairs; in the shell, quote the whole override: '{key}=[a, b]'"
    return UserError(key, value, "cannot be read", remedy)


def _no_such_choice(file: str, names: Sequence[str], overrides: Sequence[str]) -> UserError:
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    group = next((key for key in keys if file.startswith(f"{key}/")), file.rpartition("/")[0])
    name = file.removeprefix(f"{group}/")
    options = choices(group) or names
    remedy = f"Did you mean '{close}'?" if (close := _same_word(name, options)) else suggestion(name, options)
    if group in SOURCES and name and (Path(name).exists() or is_hub_id(name)):
        remedy = f"For a folder or an id of the hub: {SOURCES[group]}={name}"
    if group == "hydra/sweeper" and name == "optuna":
        remedy = "pip install 'distill-run[optuna]'"
    return UserError(group, name, "there is no such choice", remedy or HELP)


def _same_word(name: str, names: Iterable[str]) -> str | None:
    """Return the longest name that is ``name`` with other case and hyphens, or its beginning: alpkd, ALP-KD, SST-2."""
    letters = re.sub(r"[\W_]", "", name).lower()
    plain = {option: re.sub(r"[\W_]", "", option).lower() for option in names}
    matches = [option for option, word in plain.items() if letters == word or letters in (f"{word}kd", f"{word}loss")]
    return max(matches, key=len, default=None)


def _no_such_key(key: str) -> UserError:
    keys = list(configuration_keys())
    owners = dict.fromkeys(owner for name, owner in keys if name == key)
    if [*owners] == [key]:
        problem = "is a group that the chosen configuration does not have"
        return UserError(key, None, problem, f"+{key}=<choice> adds it: {', '.join(choices(key))}")
    if owners:
        return UserError(key, None, "the chosen configuration has no such key", f"It belongs to {' or '.join(owners)}.")
    if key.rpartition(".")[2] == "beta":
        return UserError(key, None, "is derived: beta = 1 - eta - lambda", "Set loss.eta and loss.lambda.")
    names = {name for name, _ in keys}
    word = OTHER_WORDS.get(key.rpartition(".")[2])
    remedy = f"Did you mean '{word}'?" if word else suggestion(key, names) or HELP
    return UserError(key, None, "there is no such key or group", remedy)


def configuration_keys() -> Iterator[tuple[str, str]]:
    """Yield the groups and the dotted keys of all files, each with its origin, such as ``task=rte``."""
    import yaml

    for file, folder in ((file, root) for root in all_folders() for file in sorted(root.rglob("*.yaml"))):
        text = file.read_text(encoding="utf-8")
        group = file.relative_to(folder).parent.as_posix()
        yield group, group
        if not group.startswith("hydra"):
            prefix = "" if group == "." or text.startswith("# @package _global_") else f"{group}."
            owner = file.name if group == "." else f"{group}={file.stem}"
            content = yaml.safe_load(text)
            yield from ((f"{prefix}{key}", owner) for key in _flat(content if isinstance(content, Mapping) else {}))


def _flat(node: Mapping[str, Any]) -> Iterator[str]:
    for key, value in node.items():
        yield key
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _flat(value))
