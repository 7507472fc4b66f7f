"""Every entry of a stage's spec: one that is missing lets two different results share a key."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.code_version import code_version
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import SCHEMA, key_of
from helpers.built_runs import student

Compose = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def pkd(compose: Compose) -> Stage:
    return student(compose("method=pkd", "seed=5"))


def with_config(stage: Stage, **values: Any) -> Stage:
    return replace(stage, config=stage.config.model_copy(update=values))


def test_the_whole_spec_of_a_student(pkd: Stage) -> None:
    assert pkd.teacher is not None
    assert pkd.model_source is not None
    content = pkd.model_source.fingerprint
    model = pkd.config.model.model_dump(exclude={"source", "tokenizer"})
    assert pkd.spec == {
        "kind": "stage",
        "schema": SCHEMA,
        "code": code_version(),
        "stage": "student",
        "seed": 5,
        "data": pkd.data_spec,
        "tokenizer": {"content": content},
        "model": model | {"content": content},
        "method": pkd.config.method.spec(pkd.outputs),
        "teacher": pkd.teacher.key,
        "teacher_outputs": "float32",
        "calibrated_on": None,
        "optim": pkd.config.optim.model_dump(mode="json"),
        "select": "best",
        "share": 1.0,
        "route": None,
        "views": None,
        "precision": "fp32",
        "versions": {name: version(name).split(".")[0] for name in ("torch", "transformers")},
    }
    assert pkd.key == key_of(pkd.spec)
    assert pkd.teacher.spec["teacher"] is None
    assert replace(pkd, route=(1, 2)).spec["route"] == (1, 2)


def test_an_untrained_model_has_no_recipe(pkd: Stage) -> None:
    """Its order of examples, learning rate and share do not matter; a new head is still drawn with the seed."""
    untrained = with_config(pkd, optim=pkd.config.optim.model_copy(update={"epochs": 0}), share=0.5)
    assert untrained.spec == {**pkd.spec, "optim": None, "select": None, "share": None}
    model = pkd.config.model.model_copy(update={"head": "keep"})
    kept = with_config(untrained, model=model).spec
    assert (kept["seed"], kept["model"]["head"]) == (None, "keep")
    for name in ("resize", "allow_missing"):  # new rows and missing tensors are drawn too
        assert with_config(untrained, model=model.model_copy(update={name: True})).spec["seed"] == 5


def test_where_weights_come_from(pkd: Stage, compose: Compose) -> None:
    """Those of an earlier stage by its key, and new ones by their architecture, whose depth belongs to it."""
    finetuned = student(compose("method=nkd", "student.init.source=finetuned"))
    assert finetuned.source_stage is not None
    assert finetuned.spec["model"]["upstream"] == finetuned.source_stage.key
    assert "content" not in finetuned.spec["model"]
    shape = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}
    new = []
    for depth, layers in ((2, 4), (2, 3), (None, 2)):
        values = {"num_layers": depth, "architecture": shape | {"num_hidden_layers": layers}, "source": None}
        model = pkd.config.model.model_copy(update=values)
        new.append(replace(with_config(pkd, model=model), model_source=None).spec["model"])
    assert new[0] == new[1] == new[2]
    assert new[0]["architecture"]["num_hidden_layers"] == 2
    assert not {"layers", "content"} & new[0].keys()


def test_an_ensemble_is_its_members_and_their_weights(compose: Compose, tiny_bert_folder: Path) -> None:
    sources = f"teacher.sources=[{tiny_bert_folder},{tiny_bert_folder}]"
    ensemble = student(compose("method=rkd", "teacher=ensemble", sources, "teacher.weights=[3,1]")).teacher
    assert ensemble is not None
    assert len(ensemble.members) == 2
    assert ensemble.spec["members"] == [member.key for member in ensemble.members]
    assert ensemble.spec["weights"] == [0.75, 0.25]
    assert ensemble.spec["data"] == ensemble.data_spec
