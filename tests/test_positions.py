"""Positions that a stage reads and that no stage of its weights has trained: what a plan says of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.planning import position_warnings
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage

Compose = Callable[..., RunConfig]
FRESH = ("student=fresh_tiny", "corpus.max_length=24", "task.max_length=40", "transfer=labeled")
LONG = ("pretraining=mlm_nsp_two_lengths",)


def resolved(compose: Compose, *overrides: str) -> Stage:
    run = compose(*overrides)
    return resolve_stage(run.stages, run.stage, "fp32")


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
