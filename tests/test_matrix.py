"""Every method with every student and every way to start it: it trains, or a refusal names the remedy."""

import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.config import RunConfig
from distill_runner.compose.explain import explain
from distill_runner.compose.folders import choices
from distill_runner.models.config import Init
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store

Compose = Callable[..., RunConfig]
INITS = get_args(Init)
FROM_WEIGHTS = ("truncated", "pretrained", "compact")
"""Students that start from layers of some model; the others have an architecture of their own."""
USUAL = ("truncated", "tiny")
WIDTHS = {"minilm_6x384": 48, "minilm_12x384": 48, "minilm_6x768": 32, "minilm_12x768": 32}


WHOLE = bool(os.environ.get("DISTILL_WHOLE_MATRIX"))
"""Every cell with every way to start, more than an hour: ``make matrix``. Else each cell has one way, in turn."""
STUDENTS = [student for student in choices("student") if not student.startswith("resnet")]
"""Students that read texts; those of images are in test_image_runs.py."""


def cells(trained: bool = False) -> list[Any]:
    """Method, student and the ways to start it. By ``make matrix``: all students but one."""
    pairs = list(itertools.product(choices("method"), STUDENTS))
    chosen = [pair for pair in pairs if WHOLE or not trained or pair[1] in USUAL]
    turns = {pair: INITS if WHOLE else (INITS[number % len(INITS)],) for number, pair in enumerate(pairs)}
    return [
        pytest.param(*pair, turns[pair], id="-".join(pair), marks=[] if pair[1] == "tiny" else [pytest.mark.matrix])
        for pair in chosen
    ]


def small(method: str, student: str, bert: Path) -> list[str]:
    """What makes a cell train on the tiny task in a moment."""
    values = ["teacher.optim.epochs=2", "optim.max_steps=2", "runtime.log_every=1", "pretraining.optim.max_steps=2"]
    values += ["pretraining.optim.batch_size=8", "corpus.max_length=48"]
    if student in FROM_WEIGHTS[1:]:
        values.append(f"student.init.source={bert}")
    if student not in FROM_WEIGHTS:
        values += [f"student.width={WIDTHS.get(student, 32)}", "student.heads=4", "student.layers=2"]
    if method == "takd":
        values.append("assistant.num_layers=3")
    if method == "rco":
        values = [value for value in values if value != "optim.max_steps=2"]
    if method in ("tinybert", "prokd", "annealing"):
        values.append("stages.phase1.optim.max_steps=2")
    if method in ("minilm", "minilmv2"):
        values += ["stages.distil.optim.max_steps=2", "stages.distil.optim.batch_size=8"]
    return values + (["relations.heads=8"] if method == "minilmv2" else [])


def resolved(compose: Compose, *overrides: str) -> tuple[RunConfig | None, Stage | UserError]:
    """The run and its student, or why there is none."""
    try:
        run = compose(*overrides)
        return run, resolve(run.stages, "student", "fp32")
    except UserError as error:
        return None, error
    except OmegaConfBaseException as error:
        told = explain(error, overrides)
        assert told is not None
        return None, told


@pytest.mark.parametrize(("method", "student", "inits"), cells())
def test_a_cell_resolves_or_names_the_remedy(
    method: str, student: str, inits: tuple[Init, ...], compose: Compose, tiny_bert_folder: Path
) -> None:
    for init in inits:
        overrides = [f"method={method}", f"student={student}", *small(method, student, tiny_bert_folder)]
        _, found = resolved(compose, *overrides, f"student.init.layers={init}")
        if isinstance(found, UserError):
            assert found.remedy, f"{init}: {found}"
            continue
        first = found.root
        if student not in FROM_WEIGHTS and method != "pd_embeddings":
            assert first.config.model.source is None, "a student of its own architecture begins with new weights"
            assert first.shape.width == WIDTHS.get(student, 32)


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "student", "inits"), cells(trained=True))
def test_a_cell_trains_for_two_steps(
    method: str, student: str, inits: tuple[Init, ...], compose: Compose, tiny_bert_folder: Path
) -> None:
    for init in inits:
        overrides = [f"method={method}", f"student={student}", *small(method, student, tiny_bert_folder)]
        losses: list[float] = []

        def report(name: str, losses: list[float] = losses) -> Callable[[Mapping[str, Any], int, float], None]:
            return lambda values, step, epoch: losses.append(values["loss"]) if "loss" in values else None

        run, stage = resolved(compose, *overrides, f"student.init.layers={init}")
        if isinstance(stage, UserError):
            assert stage.remedy
            continue
        assert run is not None
        Pipeline(Store(run.store.dir), run.runtime, report).build(stage)
        assert losses, "something was trained"
        assert all(map(math.isfinite, losses))


def test_phase_one_of_a_fresh_student_is_that_student(compose: Compose) -> None:
    _, student = resolved(compose, "method=prokd", "student=tiny")
    assert isinstance(student, Stage)
    assert student.source is not None
    assert student.source.name == "phase1"
    assert student.source.config.model.source is None
    assert student.shape.width == student.source.shape.width == 128
