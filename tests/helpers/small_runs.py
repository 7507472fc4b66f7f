"""What makes a run of the shipped configuration small."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from distill_runner.compose import resolvers
from distill_runner.compose.folders import choices, config_folder
from distill_runner.compose.run_config import RunConfig
from distill_runner.sweeping.points import Grid, expand

CONF = config_folder()
Compose = Callable[..., RunConfig]  # the fixture `compose`


def few_fast(values: Sequence[Any], number: int) -> list[Any]:
    """The parameters of a test: ``number`` of them, evenly spread, stay fast, and the others are slow."""
    fast = {round(part * (len(values) - 1) / max(1, number - 1)) for part in range(number)}
    return [value if place in fast else as_slow(value) for place, value in enumerate(values)]


def as_slow(value: Any) -> Any:
    """A parameter of a test with the mark of slow tests; a tuple has the values of several arguments."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def chosen_by(method: str) -> list[str]:
    """The choices that a method makes in other groups."""
    content = yaml.safe_load((CONF / "method" / f"{method}.yaml").read_text())
    defaults = content.get("defaults", [])
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    inherited = [part for name in defaults if isinstance(name, str) and name != "_self_" for part in chosen_by(name)]
    return [*inherited, *(f"{group.removeprefix('override /')}={choice}" for group, choice in pairs)]


def made_small(overrides: tuple[str, ...]) -> list[str]:
    """What else to set, so that two steps of a combination are short and its tiny teacher will do."""
    values = ["teacher.optim.epochs=1", "optim.max_steps=2", "runtime.log_every=1"]
    if "method=takd" in overrides:
        values.append("assistant.num_layers=3")
    name = overrides[0].removeprefix("method=")
    if name in choices("method") and "student=fresh" in chosen_by(name):
        values += [
            "student.width=32",
            "student.heads=2",
            "pretraining.optim.max_steps=2",
            "pretraining.optim.batch_size=8",
        ]
    if name in ("vectors", "similarities", "vectors_relations"):
        values += ["task.type=embeddings", "task.labels=null", "transfer=labeled"]
        values += ["teacher.fine_tuned=false", "teacher.optim.epochs=0"]
        values += ["task.dataset=embedded:pairs", "task.train=train[:100]"]
        values += ["task.validation.validation=validation[:50]"]
        values += ["relations.heads=8"] if name == "vectors_relations" else []
    if name == "tinybert":
        values.append("stages.phase1.optim.max_steps=2")
    if "mapping=explicit" in overrides:
        values.append("mapping.layers=[[2],[]]")
    if {"mapping=layer_6", "mapping=layer_12"} & set(overrides):  # layers that the small teacher has not
        values.append("mapping.layer=2")
    if {"method=minilmv2", "experiment=compositions/sid_relations"} & set(overrides):
        values.append("relations.heads=8")
    if {"method=minilm", "method=minilmv2"} & set(overrides):
        values += ["student.width=32", "student.heads=4", "stages.distil.optim.max_steps=2"]
        values += ["stages.distil.optim.batch_size=8", "corpus.max_length=48"]
    if overrides[0].startswith("experiment="):
        values += ["student.num_layers=2", "task.max_length=48", "optim.batch_size=16"]
    return values


def grid_of(fixed: Sequence[str], *varied: str, students: Sequence[str] = ()) -> Grid:
    """The grid of a command: sweep and fixed values, and further values, of which the last of a key counts."""
    resolvers.register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config("config", [*fixed], RunMode.MULTIRUN, with_log_configuration=False)
        params = [f"{key}={value}" for key, value in master.hydra.sweeper.params.items()]
        return expand(master, hydra.config_loader, [*params, *fixed, *varied], master.sweep.where, students)
