"""Tests that a setting which changes nothing is named."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from distill_runner import api
from distill_runner.common.errors import UserError
from distill_runner.compose.folders import CONFIG_DIR
from distill_runner.compose.run_config import typed_run
from distill_runner.compose.unread import unread_settings

END = "has no effect: nothing in this run reads it"


@cache
def _composed(*groups: str) -> DictConfig:
    return api.composed("task=rte", *groups)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of these overrides; Hydra composes only their choices of groups, each once."""
    values = [override for override in overrides if "." in override.partition("=")[0]]
    config = copy.deepcopy(_composed(*(override for override in overrides if override not in values)))
    for override in values:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), merge=False)
    return config


def unread(*overrides: str, **choices: str) -> list[str]:
    """Return the lines on what these overrides, or the chosen files of the user's folder, set to no effect."""
    config = composed(overrides)
    return unread_settings(config, typed_run(config), overrides, choices)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ("method=rkd loss.temperature=2 seed=1 runtime.device=cpu student.num_layers=3", []),
        ("method=alp loss.eta=0.3 mapping=skip mapping.supervise_last=true task.epochs=2 +task.test.test=test", []),
        ("method=nkd student.init.layers=group_top teacher.source=bert-base-uncased", []),
        ("method=kd transfer=sst2 transfer.size=4 student.layers=2", []),
        ("method=prokd loss.tau_max=2 route.epochs=1 student.phase1.select=best", []),
        ("method=nkd loss.temperature=5", ["loss.temperature=5"]),
        ("method=nkd mapping=last attention=kqv4", ["mapping=last", "attention=kqv4"]),
        ("method=nkd teacher.optim.lr=1.0e-5", ["teacher.optim.lr=1.0e-5"]),
        ("method=rkd loss.lambda=0.1", ["loss.lambda=0.1"]),
        ("method=rkd loss.eta=0 loss.temperature=2", ["loss.temperature=2"]),  # its term has weight 0
        ("method=rkd optim.momentum=0.5 optim.drop=0.3", ["optim.momentum=0.5", "optim.drop=0.3"]),
        ("method=rkd optim.name=sgd optim.momentum=0.5 optim.eps=0.1", ["optim.eps=0.1"]),
        ("method=rkd transfer=sst2", ["transfer=sst2"]),
        ("method=rkd corpus.hold_out=100", ["corpus.hold_out=100"]),
        ("method=rkd augment.views=3 corpus.version=2", ["augment.views=3", "corpus.version=2"]),
        ("method=rkd optim.epochs=2 teacher.optim.epochs=2 task.epochs=4", ["task.epochs=4"]),
        ("method=rkd sweep.halving=2 sweep.shard=0/2", ["sweep.halving=2", "sweep.shard=0/2"]),
        ("method=rkd stage=teacher optim.lr=1.0e-3", ["method=rkd", "optim.lr=1.0e-3"]),
        ("method=kd student.init.layers=group_top", ["student.init.layers=group_top"]),  # it has new weights
        ("method=rkd stages.student.optim.momentum=0.5", ["stages.student.optim.momentum=0.5"]),
        ("method=rkd stages.student.optim.lr=0.5 stages.student.seed=3", []),
        (
            "method=rkd +stages.student.model.architecture.hidden_size=64",
            ["stages.student.model.architecture.hidden_size=64"],
        ),
        ("method=rkd task.hold_out=0.3", ["task.hold_out=0.3"]),
        ("method=rkd task.hold_out=0.3 task.select_on=held_out", []),
        ("method=rkd stages.student.task.hold_out=0.3", ["stages.student.task.hold_out=0.3"]),
    ],
)
def test_only_what_nothing_reads_is_named(overrides: str, lines: list[str]) -> None:
    assert unread(*overrides.split()) == [f"{line} {END}" for line in lines]


def test_the_choice_that_is_meant_is_named() -> None:
    """mapping.rule=last looks right, changes nothing, and gave the same key without a word."""
    assert unread("method=nkd", "mapping.rule=last") == [f"mapping.rule=last {END}; did you mean mapping=last?"]


@pytest.fixture
def own_folder(tmp_path: Path) -> Any:
    for name, text in {
        "experiment/mine.yaml": "# @package _global_\nloss: {temperature: 3}\noptim: {lr: 1e-3, drop: 0.5}\nseed: 3\n",
        "experiment/other.yaml": "# @package _global_\nattention: {normalize: true}\n",
        "experiment/bare.yaml": "loss: {temperature: 3}\n",
        "mapping/hot.yaml": "rule: hot\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    CONFIG_DIR[:] = ["--config-dir", str(tmp_path)]
    yield tmp_path
    CONFIG_DIR.clear()


def test_keys_of_the_users_own_files_are_named_too(own_folder: Path) -> None:
    assert unread("method=nkd", experiment="mine") == [
        f"loss.temperature=3 in experiment/mine.yaml {END}",
        f"optim.drop=0.5 in experiment/mine.yaml {END}",
    ]
    assert unread("method=alp", experiment="other") == []
    assert unread("method=alp", experiment="bare")[0].endswith(f"{END}; does its first line say # @package _global_?")


def test_a_sweep_is_no_single_run() -> None:
    """api.compose took one point of an experiment that makes ten, and said nothing."""
    with pytest.raises(UserError, match="experiment=demo: is a sweep, but one run is composed here: method=nkd,kd"):
        api.compose("experiment=demo")
    run = api.compose("experiment=demo", "method=nkd", "seed=2")
    assert (run.method, run.seed) == ("nkd", 2)
    assert api.compose("experiment=demo_methods", "hydra.mode=RUN", "method=rkd").method == "rkd"
