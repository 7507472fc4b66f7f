"""Positions that a stage reads and that no stage of its weights has trained: what a plan says of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.planning import position_warnings
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage

Compose = Callable[..., RunConfig]
FRESH = ("student=fresh_tiny", "corpus.max_length=24", "task.max_length=40", "transfer=labeled")
LONG = ("pretraining=mlm_nsp_two_lengths",)


def resolved(compose: Compose, *overrides: str) -> Stage:
    run = compose(*overrides)
    return resolve(run.stages, run.stage, "fp32")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("method=pf", *FRESH), ["stage student reads 40 positions, of which its weights (pretrain) have trained 24"]),
        (("method=pd", *FRESH), ["stage student reads 40 positions, of which its weights (pretrain) have trained 24"]),
        (("method=pdf", *FRESH), ["stage distil reads 40 positions, of which its weights (pretrain) have trained 24"]),
        (
            ("method=pf", *FRESH, *LONG, "stages.pretrain_long.corpus.max_length=32"),
            ["stage student reads 40 positions, of which its weights (pretrain, pretrain_long) have trained 32"],
        ),
        (("method=pf", *FRESH, *LONG, "stages.pretrain_long.corpus.max_length=40"), []),
        (("method=pf", *FRESH, "corpus.max_length=40"), []),
        (("method=pf", *FRESH, "corpus.max_length=48"), []),
        (("method=basic", *FRESH), []),
        (("method=kd", *FRESH), []),
        (("method=pf", "corpus.max_length=24", "student=truncated"), []),
        (
            ("method=minilmv2", "relations.heads=8", "student.width=32", "student.heads=4", "corpus.max_length=16"),
            ["stage student reads 48 positions, of which its weights (distil) have trained 16"],
        ),
    ],
)
def test_a_plan_says_which_positions_are_untrained(
    overrides: tuple[str, ...], expected: list[str], compose: Compose
) -> None:
    """A student pre-trained on 128 tokens would read texts of 512 with 384 positions of random numbers, unnoticed."""
    assert [line.partition(":")[0] for line in position_warnings(resolved(compose, *overrides))] == expected


def test_the_plan_of_a_run_shows_it(compose: Compose, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A check that no command calls warns nobody."""
    from distill_runner.running import run_stage

    run = compose("method=pf", *FRESH, "plan=true")
    with caplog.at_level("WARNING"):
        run_stage(run, tmp_path, {"recipe": {"paper": "paper"}})
    assert "stage student reads 40 positions, of which its weights (pretrain) have trained 24" in caplog.text
    assert "task.max_length=24" in caplog.text


@pytest.mark.parametrize("experiment", ["demo", "demo_methods", "demo_questions"])
def test_demos_read_only_positions_that_they_train(experiment: str, compose: Compose) -> None:
    """The demo of questions pre-trained on 64 tokens and read windows of 160."""
    stage = resolve(compose(f"experiment={experiment}", "method=rkd", tiny=False).stages, "student", "fp32")
    assert stage.first_teacher is not None
    assert stage.first_teacher.earlier
    assert position_warnings(stage) == []


@pytest.fixture(scope="module")
def student(compose: Compose) -> Stage:
    return resolved(compose, "method=pf", *FRESH)


LENGTHS = st.integers(8, 64)


@given(
    chain=st.lists(st.tuples(LENGTHS, st.booleans(), st.booleans()), min_size=1, max_size=5),
    length=LENGTHS,
    pretrained=st.booleans(),
)
def test_trained_positions_are_those_that_a_simulation_marks(
    chain: list[tuple[int, bool, bool]], length: int, pretrained: bool, student: Stage
) -> None:
    """A chain of stages that may be trained or not, and may copy weights or draw new ones, position by position."""
    template = student.source
    assert template is not None
    assert template.config.corpus is not None
    stage, marked, known = None, set[int](), False
    for max_length, is_trained, copies in chain:
        config = template.config.model_copy(
            update={
                "corpus": template.config.corpus.model_copy(update={"max_length": max_length}),
                "optim": template.config.optim.model_copy(update={} if is_trained else {"epochs": 0}),
                "model": template.config.model.model_copy(update={"layers": "first" if copies else "random"}),
            }
        )
        given_weights = student.tokenizer if pretrained and stage is None else None
        if stage is None:
            marked, known = set(), pretrained
        elif not copies:
            marked, known = set(), False
        stage = replace(template, config=config, source=stage, model_source=given_weights)  # type: ignore[arg-type]
        marked |= set(range(max_length)) if is_trained else set()
    assert student.config.task is not None
    task = student.config.task.model_copy(update={"max_length": length})
    last = replace(student, config=student.config.model_copy(update={"task": task}), source=stage)
    untrained = set(range(length)) - marked if marked and not known else set()
    assert bool(position_warnings(last)) == bool(untrained)
    if untrained:
        assert last.num_trained_positions == min(untrained)
