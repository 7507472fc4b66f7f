"""Every method with every student and every way to start it: it trains, or a refusal names the remedy."""

import csv
import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.explain import explain
from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.models.config import Init
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store

Compose = Callable[..., RunConfig]
INITS = get_args(Init)
FROM_WEIGHTS = ("truncated", "pretrained", "pretrained_compact")
"""Students that start from layers of some model; the others have an architecture of their own."""
OF_THE_HUB = {
    "modernbert_base",
    "ettin_17m",
    "ettin_32m",
    "ettin_68m",
    "ettin_150m",
    "mmbert_small",
    "deberta_v3_small",
}
"""Students that are ``pretrained`` with a source of their own."""
OF_IMAGES = ("resnet", "resnet8", "resnet20")
USUAL = ("truncated", "fresh_tiny")
WIDTHS = {"minilm_6x384": 48, "minilm_12x384": 48, "minilm_6x768": 32, "minilm_12x768": 32}
OUTCOMES = os.environ.get("DISTILL_WHOLE_MATRIX")
"""The file for the outcome of every cell with every way to start, as of ``make matrix``, which takes more than an hour
and goes on where it was cut off; none: each cell has one way, in turn."""


def cells(trained: bool = False) -> list[Any]:
    """Method, student (not tables of tokens) and the ways to start it. By ``make matrix``: all students but one."""
    pairs = list(itertools.product(choices("method"), sorted({*choices("student")} - OF_THE_HUB - {"static"})))
    chosen = [pair for pair in pairs if OUTCOMES or not trained or pair[1] in USUAL]
    turns = {pair: INITS if OUTCOMES else (INITS[number % len(INITS)],) for number, pair in enumerate(pairs)}
    return [
        pytest.param(
            *pair, turns[pair], id="-".join(pair), marks=[] if pair[1] == "fresh_tiny" else [pytest.mark.matrix]
        )
        for pair in chosen
    ]


Cell = Callable[[str, str, Init], tuple[RunConfig | None, Stage | UserError]]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all cells, so that they share their teachers, and one student where several describe the same."""
    return tmp_path_factory.mktemp("store_of_the_matrix")


@pytest.fixture
def cell(compose: Compose, tiny_bert_folder: Path, images_folder: Path, store: Path) -> Cell:
    """A small run of a method, a student and a way to start it, and its student, or why there is none."""

    def made(method: str, student: str, init: Init) -> tuple[RunConfig | None, Stage | UserError]:
        images = student in OF_IMAGES
        own = of_images(student, images_folder) if images else of_texts(method, student, tiny_bert_folder)
        values = [f"method={method}", f"student={student}", *own, *steps(method), f"student.init.layers={init}"]
        return resolved(compose, *values, f"store.dir={store}", tiny=not images)

    return made


def of_texts(method: str, student: str, bert: Path) -> list[str]:
    values = ["corpus.max_length=48"]
    if student in FROM_WEIGHTS[1:]:
        values.append(f"student.init.source={bert}")
    if student not in FROM_WEIGHTS:
        values += [f"student.width={WIDTHS.get(student, 32)}", "student.heads=4", "student.layers=2"]
    if method == "takd":
        values.append("assistant.num_layers=3")
    return values + (["relations.heads=8"] if method == "minilmv2" else [])


def of_images(student: str, folder: Path) -> list[str]:
    """Noise of 12 x 12 to read, by networks of 14 or 20 layers and a student of eight or twenty."""
    task = ["task=custom_images", f"task.dataset={folder}", "corpus=embedded", "teacher=resnet", "teacher.depth=14"]
    return [*task, "teacher.optim.batch_size=16", "optim=cifar", "optim.batch_size=16"]


def steps(method: str) -> list[str]:
    """What makes every stage train for a moment only."""
    values = ["teacher.optim.epochs=2", "runtime.log_every=1", "pretraining.optim.max_steps=2"]
    values.append("pretraining.optim.batch_size=8")
    if method != "rco":
        values.append("optim.max_steps=2")
    if method in ("tinybert", "prokd", "annealing"):
        values.append("stages.phase1.optim.max_steps=2")
    if method in ("minilm", "minilmv2"):
        values += ["stages.distil.optim.max_steps=2", "stages.distil.optim.batch_size=8"]
    return values


def resolved(compose: Compose, *overrides: str, tiny: bool = True) -> tuple[RunConfig | None, Stage | UserError]:
    """The run and its student, or why there is none."""
    try:
        run = compose(*overrides, tiny=tiny)
        return run, resolve_stage(run.stages, "student", "fp32")
    except UserError as error:
        return None, error
    except OmegaConfBaseException as error:
        told = explain(error, overrides)
        assert told is not None
        return None, told


@pytest.mark.parametrize(("method", "student", "inits"), cells())
def test_a_cell_resolves_or_names_the_remedy(method: str, student: str, inits: tuple[Init, ...], cell: Cell) -> None:
    for init in inits:
        _, found = cell(method, student, init)
        if isinstance(found, UserError):
            assert found.remedy, f"{init}: {found}"
            continue
        first = found.root
        if student not in FROM_WEIGHTS + OF_IMAGES and method != "pd_embeddings":
            assert first.config.model.source is None, "a student of its own architecture begins with new weights"
            assert first.shape.width == WIDTHS.get(student, 32)


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "student", "inits"), cells(trained=True))
def test_a_cell_trains_for_two_steps(method: str, student: str, inits: tuple[Init, ...], cell: Cell) -> None:
    for init in sorted(set(inits) - kept(method, student)):
        losses: list[float] = []

        def report(name: str, losses: list[float] = losses) -> Callable[[Mapping[str, Any], int, float], None]:
            return lambda values, step, epoch: losses.append(values["loss"]) if "loss" in values else None

        run, stage = cell(method, student, init)
        if isinstance(stage, UserError):
            assert stage.remedy
            keep(method, student, init, "", str(stage))
            continue
        assert run is not None
        pipeline = Pipeline(Store(run.store.dir), run.runtime, report)
        is_another_cells = pipeline.store.has(stage.spec)
        pipeline.build(stage)
        assert losses or is_another_cells, "something was trained"
        assert all(map(math.isfinite, losses))
        keep(method, student, init, stage.key)


def kept(method: str, student: str) -> set[str]:
    """Ways to start that are in the file of outcomes."""
    if not OUTCOMES or not os.path.exists(OUTCOMES):
        return set()
    with open(OUTCOMES, newline="") as file:
        return {init for *pair, init, _, _ in csv.reader(file) if pair == [method, student]}


def keep(method: str, student: str, init: Init, key: str, refusal: str = "") -> None:
    """Adds a cell to the file of outcomes, if one is asked for: the key of what it trained, or its refusal."""
    if OUTCOMES:
        with open(OUTCOMES, "a", newline="") as file:
            csv.writer(file).writerow([method, student, init, key, refusal])
