"""The typed configuration of a run, made from the configuration that Hydra composed."""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationInfo, field_validator

from distill_runner.common.errors import error_context, format_value
from distill_runner.common.schema import Assumption, Schema, validate_config, values_at
from distill_runner.common.terminal import terminal_width
from distill_runner.compose.folders import CONFIG_DIR
from distill_runner.compose.resolvers import TEMPLATE, complete_stages
from distill_runner.pipeline.config import StageConfig, StoreConfig, TeacherConfig
from distill_runner.tracking.trackers import TrackerConfig
from distill_runner.training.config import Runtime


class RunConfig(Schema):
    """Configuration of a run. ``stage`` names the stage to build; other stages are built only if it needs them."""

    teacher: TeacherConfig
    stages: dict[str, StageConfig]
    runtime: Runtime
    store: StoreConfig
    tracker: TrackerConfig
    method: str
    command: str
    seed: int
    stage: str
    plan: bool

    @field_validator("stages", mode="before")
    @classmethod
    def _by_name(cls, stages: Any, info: ValidationInfo) -> Any:
        """Validate each stage separately, so that errors name the stage; an error in ``teacher`` is reported first."""
        typed_stages: dict[str, StageConfig] = {}
        if "teacher" not in info.data:
            return typed_stages
        for name, stage in stages.items():
            with error_context(f"stages.{name}"):
                typed_stages[name] = validate_config(StageConfig, stage, ".")
        return typed_stages


_PARTS = ("stages", "teacher", "runtime", "store", "tracker", "seed", "stage", "plan")
"""Top-level keys of the configuration that a run is made of."""


def typed_run(config: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the typed configuration of the run that ``config`` describes.

    Args:
        overrides: overrides as typed, for the command that repeats the run.
    Raises:
        UserError: the schema refuses a value, or a stage inherits from a name that does not exist.
    """
    nodes = {key: config[key] for key in (*_PARTS, TEMPLATE) if key in config}
    parts: dict[str, Any] = {
        key: OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for key, node in nodes.items()
    }
    values = {key: parts[key] for key in _PARTS if key in parts}
    values["stages"] = complete_stages(parts)
    values["teacher"] = {key: parts["teacher"][key] for key in ("name", "source", "fine_tuned")}
    command = shlex.join(["distill-run", *overrides, *CONFIG_DIR])
    values |= {"method": OmegaConf.select(config, "method.name"), "command": command}
    return validate_config(RunConfig, values)


def resolved_settings(config: DictConfig) -> dict[str, Any]:
    """Return the whole configuration as plain values, with all that the stages inherit, to be stored with a run.

    ``loss.beta`` is the weight of the hard labels, if the method derives it from the other weights.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    raw_weights: Any = OmegaConf.to_container(config.method.get("weights") or OmegaConf.create(), resolve=False)
    derived = [name for name, weight in raw_weights.items() if str(weight).startswith("${beta:")]
    if derived and "loss" in config:
        settings["loss"]["beta"] = config.method.weights[derived[0]]
    return {**settings, "stages": complete_stages(settings)}


DECLARING = ("recipe", "method", "student", "pretraining")
"""Parts of the configuration that may have ``assumptions``."""


def paper_comparison(settings: Mapping[str, Any]) -> list[str]:
    """Return a header, and a line for each setting of the run that the recipe's paper mentions.

    Args:
        settings: resolved configuration.
    """
    recipe = settings["recipe"]
    rows = [("recipe", "this run", str(recipe["paper"]))]
    for key, claim in recipe.get("says", {}).items():
        rows += [(key, format_value(value), str(claim)) for value in values_at(settings, key)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for key, value, claim in rows:
        head = f"{key:<{widths[0]}}  {value:<{widths[1]}}  "
        lines += textwrap.wrap(claim, terminal_width(), initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def assumptions_of_files(settings: Mapping[str, Any]) -> list[str]:
    """Return the assumptions that the chosen configuration files declare under ``assumptions``, one line each.

    An assumption with a ``value`` applies only while the option has that value. An assumption about an option that the
    run does not have is left out. Its source is the recipe's paper unless it names another.

    Assumptions of tasks and corpora are not included; they are read with their stages. A run that was made in Python,
    without configuration files, has no assumptions here.
    """
    if "recipe" not in settings:
        return []
    paper, lines = settings["recipe"]["paper"], []
    for part in DECLARING:
        for key, declared in (settings.get(part) or {}).get("assumptions", {}).items():
            entry = declared if isinstance(declared, Mapping) else {"text": declared}
            arguments = {name: entry[name] for name in ("text", "source", "value") if name in entry}
            assumption = Assumption(**{"source": paper, **arguments})
            lines += [assumption.line(key, value) for value in values_at(settings, key) if assumption.applies_to(value)]
    return lines
