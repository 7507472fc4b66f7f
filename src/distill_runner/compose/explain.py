"""Explain errors to the user: the key as it is typed, its value, the remedy."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError, safe_load

from distill_runner.common.errors import UserError, causes, command, first_line, override, root_cause, suggestion
from distill_runner.common.files import resource_error
from distill_runner.common.hub import is_hub_id
from distill_runner.compose.command_line import HELP, KEY
from distill_runner.compose.folders import choices, configuration_keys, own_folder
from distill_runner.compose.resolvers import inherit_stages

_SOURCES = {
    "task": ("task", "custom", "task.dataset"),
    "teacher": ("teacher", "base", "teacher.source"),
    "student": ("student", "pretrained", "student.init.source"),
}
"""Group -> the overrides whose last one takes a folder or an id of the hub in place of a name."""
OTHER_WORDS: dict[str, str] = safe_load(Path(__file__).with_name("other_words.yaml").read_text(encoding="utf-8"))
"""Options of other tools, and the option that means the same here."""
COMPOSITION_ERRORS = (UserError, HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError)
"""Exceptions that are raised if a configuration cannot be composed."""


def explain(error: BaseException, overrides: Sequence[str]) -> UserError | None:
    """Return the user's mistake that made Hydra raise ``error`` while composing; None if there is no such mistake."""
    for cause in causes(error):
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, MarkedYAMLError) and cause.problem_mark:
            place = f"{cause.problem_mark.name}, line {cause.problem_mark.line + 1}"
            return UserError(place, None, f"cannot be read: {cause.problem or cause.context}")
    if full := resource_error(error):
        return full
    if isinstance(error, RecursionError):
        remedy = "Look at the defaults and interpolations of your own files."
        return UserError("configuration", None, "its parts refer to each other in a circle", remedy)
    text = str(error) or root_cause(error)
    if match := re.search(r"Unknown plugin class : 'hydra_plugins\.hydra_(\w+)_(launcher|sweeper)\.", text):
        name, group = match.groups()
        value = next((part.partition("=")[2] for part in overrides if part.startswith(f"hydra/{group}=")), name)
        remedy = command(f"pip install hydra-{name}-{group}")
        return UserError(f"hydra/{group}", value, "needs a package that is not installed", remedy)
    if not isinstance(error, COMPOSITION_ERRORS):
        return None
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals or not KEY.fullmatch(key):
            return UserError(f".{error.override}", None, "is not of the form <key>=<value>", HELP)  # a first dot is cut
        remedy = "Brackets and quotes come in pairs, or the text is in quotes; in the shell, quote the whole override: "
        remedy += override(key, ["<a>", "<b>"] if value[:1] == "[" else value.strip("'\""))
        return UserError(key, value, "cannot be read", remedy)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file, error.options or [], overrides)
    if text.startswith("Config group override must be"):
        pairs = (override.partition("=") for override in overrides)
        unknown = [f"{key}/{name}" for key, _, name in pairs if name not in (choices(key) or [name])]
        return _no_such_choice(unknown[0] if unknown else "", [], overrides)
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^=']+)=(.*)'(?:\n| requires)", text):
        key, values = match.groups()
        words = ["distill-run", "-m", *(["hydra/sweeper=optuna"] if values.startswith("interval") else [])]
        remedy = "One run for each value: " + command(shlex.join([*words, f"{key}={values}"]))
        return UserError(key, values, "has several values", remedy + ". A list takes brackets.")
    if match := re.search(r"(?:Could not (?:override|delete(?: from config\.)?)|[Kk]ey) '([^'@]+)", text):
        return _no_such_key(match[1], overrides)
    if match := re.search(r"already at '(\S+)'|Multiple values for (\S+)\.|^(\S+) appears more than once", text):
        added = [key for key, _, _ in (text[1:].partition("=") for text in overrides if text[0] == "+") if choices(key)]
        remedy = "Leave out a plus sign; in the defaults of a file, write override before the name."
        return UserError([*added, match[match.lastindex or 0]][0], None, "is in the configuration already", remedy)
    if isinstance(error, OSError) and error.filename:
        remedy = "Work in a folder that you may write to, or set hydra.run.dir and store.dir."
        return UserError(str(error.filename), None, error.strerror or "cannot be used", remedy)
    if match := re.match(r"Error merging override ([^=]+)=(.*)", text):
        return UserError(match[1], match[2], f"cannot be set: {first_line(error.__cause__ or error)}", HELP)
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return UserError(error.full_key, None, re.sub(r"^\w+ raised while resolving interpolation: ", "", first))
    return UserError("configuration", None, first, rest[0] if rest else "")


def user_facing_error(
    error: UserError | OmegaConfBaseException, config: DictConfig, overrides: Sequence[str]
) -> Exception:
    """Return an error in a composed configuration, for the key that the user sets.

    Interpolations are followed from a key of a stage back to the key that the value comes from.
    """
    if not isinstance(error, UserError):
        return explain(error, overrides) or error
    if error.problem == "needs a value" and f"~{error.key}" in overrides:
        return _no_such_key(error.key, overrides)
    if not error.key.startswith("stages."):
        return error
    parent, stage = error.key.rpartition(".")[0], error.key.split(".")[1]
    source = next((str(name) for name in config if str(name).startswith(stage)), stage)  # teacher, pretraining
    places = (parent.replace(f"stages.{stage}", source, 1), parent.rpartition(".")[2])
    place = next((one for one in places if OmegaConf.select(config, one) is not None), None)
    for text in overrides if error.problem == "needs a value" and place else ():
        if (key := text.lstrip("+").partition("=")[0]).startswith(f"{parent}."):
            remedy = f"Set {place}{key.removeprefix(parent)} instead."
            return UserError(key, OmegaConf.select(config, key), f"replaces all other options of {parent}", remedy)
    raw_settings: Any = OmegaConf.to_container(config, resolve=False)
    plain, path = {**raw_settings, "stages": inherit_stages(raw_settings)}, list[str]()
    for part in error.key.split("."):
        path.append(part)
        while isinstance(raw := reduce(_entry, path, plain), str) and re.fullmatch(r"\$\{.*\}", raw):
            sources = re.findall(r"\$\{([\w.]+)\}", raw)
            if not sources:
                break
            # If there are several keys, as in ${choose:${a},name,${b}}, take the key that has the value.
            source = next((key for key in sources if OmegaConf.select(config, key) == error.value), sources[0])
            path = source.split(".")
    if OmegaConf.select(config, ".".join(path)) == "pretrained":
        path = ["teacher", "source"]
    return error.with_key(".".join(path))


def _entry(node: Any, key: str) -> Any:
    return node.get(key) if isinstance(node, Mapping) else None


def _no_such_choice(file: str, names: Sequence[str], overrides: Sequence[str]) -> UserError:
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    group = next((key for key in keys if file.startswith(f"{key}/")), file.rpartition("/")[0])
    name = file.removeprefix(f"{group}/")
    remedy = suggestion(name, names if group.startswith("hydra/") else choices(group) or names) or HELP
    if group in _SOURCES and name and (Path(name).exists() or is_hub_id(name)):
        remedy = "For a folder or an id of the hub: " + override(*_SOURCES[group], name)
    if group.startswith("hydra/") and name in ("joblib", "submitit_local", "optuna"):
        remedy = command(f"pip install hydra-{name.partition('_')[0]}-{group.removeprefix('hydra/')}")
    return UserError(group, name, "there is no such choice", remedy)


def _no_such_key(key: str, overrides: Sequence[str]) -> UserError:
    keys, folder = configuration_keys(), own_folder()
    for text in overrides:
        place, _, value = text.lstrip("+~").partition("=")
        if not f"{key}.".startswith(f"{place}.") and f"{place}.{key}" not in keys:
            continue
        if text[0] == "~" and place in keys:
            return UserError(f"~{place}", None, "cannot be deleted: it is null, or others refer to it", "Leave it out.")
        file = (folder or Path()) / place / f"{value}.yaml"
        if folder and file.is_file() and "defaults" not in file.read_text(encoding="utf-8"):
            remedy = f"Begin it with a list of files that it changes: 'defaults: [<a {place}>, _self_]'."
            problem = f"has no defaults, and lacks {key.removeprefix(f'{place}.')}"
            return UserError(f"{place}/{file.name}", None, problem, remedy)
    owners, name = [*dict.fromkeys(keys.get(key, []))], key.rpartition(".")[2]
    if owners == [key]:
        problem = "is a group that the chosen configuration does not have"
        return UserError(key, None, problem, override(f"+{key}", "<choice>") + f" adds it: {', '.join(choices(key))}")
    if owners:
        names = [override(*owner.split("=")) if "=" in owner else owner for owner in owners[:5]]
        remedy = reduce(lambda text, name: text + " or " + name, names[1:], "It belongs to " + names[0])
        remedy += " or others" if len(owners) > 5 else ""
        return UserError(key, None, "the chosen configuration has no such key", remedy)
    if name == "beta":
        return UserError(key, None, "is derived: beta = 1 - eta - lambda", "Set loss.eta and loss.lambda.")
    of_group = (other for other in keys if other.startswith(key.partition(".")[0]) and other.endswith(f".{name}"))
    option = next(of_group, OTHER_WORDS.get(name))
    remedy = f"Did you mean '{option}'?" if option else suggestion(key, keys) or HELP
    return UserError(key, None, "there is no such key or group", remedy)
