"""What a result says of its run: the settings in which a paper's rows differ, and the number that it finds by them."""

from collections.abc import Callable
from typing import Any

import pytest

from distill_runner.compose.config import RunConfig
from distill_runner.methods.config import parse_method
from distill_runner.report.cells import telling_rows
from distill_runner.report.result import _settings_of, described_by, printed
from distill_runner.report.settings import settings_of

Compose = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("overrides", "num_layers", "value"),
    [
        (("method=rkd",), 4, 65.34),
        (("method=pkd",), 4, 65.70),
        (("method=pkd", "mapping=layer", "mapping.layer=6"), 2, 57.40),
        (("method=ckd", "mapping=po"), 6, 67.51),
        (("method=alp",), 4, 67.15),
        (("method=alp", "mapping=po", "attention=kqv1"), 4, 65.32),
        (("method=alp", "attention=kqv4"), 4, 67.31),
    ],
)
def test_a_run_finds_its_number_by_itself(
    overrides: tuple[str, ...], num_layers: int, value: float, compose: Compose
) -> None:
    run = compose("task=rte", *overrides, f"student.num_layers={num_layers}", tiny=False)
    found = printed(run, num_layers, 768, "accuracy")
    assert found is not None
    assert (found.value, found.comparable) == (value, True)


def test_the_settings_of_a_method() -> None:
    relations = {"mapping": {"rule": "top", "layer": 21}, "pairs": ["QQ", "KK"], "heads": 48}
    terms = {
        "hard": {"term": "no_such_term"},
        "soft": {"term": "soft_labels", "temperature": 1.0},
        "kl": {"term": "attention_relations", **relations},
    }
    method = {"terms": terms, "weights": {"hard": 0, "soft": 1, "kl": 1}, "schedule": {"rule": "sid", "share": 0.7}}
    assert _settings_of(parse_method(method)) == {
        "terms": ["soft", "kl"],
        "temperature": 1.0,
        "scale_by_t2": True,
        "mapping": "top:21",
        "pairs": ["QQ", "KK"],
        "heads": 48,
        "over_layers": "mean",
        "over_rows": "sequence",
        "schedule.rule": "sid",
        "schedule.limits": None,
        "schedule.share": 0.7,
        "schedule.thresholds": None,
        "schedule.watch": "cos",
        "schedule.classification": "at_end",
        "schedule.trains": "all",
    }


def test_a_run_of_another_variant_finds_none(compose: Compose) -> None:
    assert printed(compose("task=rte", "method=pkd", "mapping=all", tiny=False), 4, 768, "accuracy") is None


def test_settings_name_all_that_a_student_needs(compose: Compose) -> None:
    known = settings_of(compose("method=prokd"))
    assert known["stages"] == ["phase1", "teacher"]
    assert {"ce.weight": 1, "optim.lr": 3e-3, "share": 1.0, "transfer": None, "route": None}.items() <= known.items()
    assert (known["phase1.logits.soften"], known["teacher.optim.lr"]) == ("divide", 3e-3)
    assert not [name for name in known if name.endswith("seed")]
    untaught = settings_of(compose("method=nkd", "stages.student.views=8"))
    assert (untaught["stages"], untaught["views"]) == ([], None), "it reads no teacher"


DATA = {
    "config": None,
    "revision": None,
    "columns": ["sentence1", "sentence2"],
    "labels": ["label"],
    "train": "train",
    "validation": {"validation": "validation"},
}


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        (["method=nkd"], {"select_on": "validation"}),
        (["method=nkd", "task.config=en"], {"select_on": "validation", "config": "en"}),
        (["method=nkd", "task.label=other"], {"select_on": "validation", "labels": ["other"]}),
        (["method=nkd", "task.train=train[:50%]"], {"select_on": "validation", "train": "train[:50%]"}),
        (["method=nkd", "task.select_on=mean"], {"select_on": "validation"}),  # the mean of one split
        (["method=nkd", "task.select_on=held_out"], {"select_on": "held_out", "hold_out": 0.1}),
        (["method=nkd", "task.select_on=held_out", "task.hold_out=0.5"], {"select_on": "held_out", "hold_out": 0.5}),
    ],
)
def test_a_result_names_the_data_that_a_student_uses(
    overrides: list[str], used: dict[str, Any], compose: Compose
) -> None:
    described = described_by(compose(*overrides))
    assert described["data"] == {**DATA, "scored_on": ["validation"], **used}


def test_a_result_names_the_seed_of_the_teacher_that_it_reads(compose: Compose) -> None:
    seeds = [
        described_by(compose(name, "teacher.seed=7", "seed=1"))["teacher_seed"] for name in ("method=rkd", "method=nkd")
    ]
    assert seeds == [7, None]


RELATIONS = ("method=minilmv2", "student=fresh_tiny", "relations.heads=2")
PRETRAINED = ("method=pd", "student=fresh_tiny")
ENSEMBLE = ("method=rkd", "teacher=ensemble", "teacher.sources=[a,b]")
LABELLED = ("method=rkd", "teacher=labels", "task.probabilities=[a,b]")


@pytest.mark.parametrize(
    ("overrides", "change", "names"),
    [
        (RELATIONS, "relations.pairs=[QK,VV]", ["distil.relations.pairs"]),
        (RELATIONS, "relations.heads=1", ["distil.relations.heads"]),
        (RELATIONS, "mapping.layer=1", ["distil.relations.mapping.layer"]),
        (RELATIONS, "corpus.max_length=48", ["distil.corpus.max_length", "encoder.corpus.max_length"]),
        (RELATIONS, "corpus.stream=true", []),
        (("method=prokd",), "loss.annealed_temperature=false", ["phase1.logits.soften"]),
        (("method=rco",), "route.checkpoints=[1]", ["route.checkpoints"]),
        (("method=takd",), "assistant.num_layers=3", ["assistant.model.num_layers"]),
        (("method=rkd",), "teacher.optim.lr=1e-4", ["teacher.optim.lr"]),
        (("method=rkd",), "stages.student.share=0.5", ["share"]),
        (("method=rkd",), "teacher.outputs=float16", ["teacher_outputs"]),
        (("method=rkd",), "stages.student.views=8", ["views"]),
        (PRETRAINED, "pretraining.optim.max_steps=3", ["pretrain.optim.max_steps"]),
        ((*PRETRAINED, "transfer=imdb"), "transfer.size=200", ["transfer_size"]),
        (PRETRAINED, "transfer=imdb", ["transfer"]),
        (("method=nkd", "student=fresh_tiny"), "student.heads=1", ["architecture.num_attention_heads"]),
        (PRETRAINED, "student.heads=1", ["pretrain.model.architecture.num_attention_heads"]),
        (ENSEMBLE, "teacher.weights=[1,2]", ["teacher.given.weights"]),
        (LABELLED, "task.probabilities=[c,d]", ["teacher.given.columns"]),
        (("method=nkd",), "task.class_weights=balanced", []),
        (("method=prokd",), "optim.lr=1e-4", []),
        (("method=prokd",), "seed=7", []),
    ],
)
def test_what_differs_before_the_student_is_found(
    overrides: tuple[str, ...], change: str, names: list[str], compose: Compose
) -> None:
    every = [settings_of(compose(*overrides)), settings_of(compose(*overrides, change))]
    assert telling_rows(every) == names
    assert (every[0] == every[1]) == (change in ("seed=7", "corpus.stream=true"))
