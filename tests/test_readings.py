"""Readings: declared with the option, listed by every run that they apply to, and all on one page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distill_runner.compose.config import RunConfig
from distill_runner.pipeline.resolving import resolve
from distill_runner.report.readings_page import page
from distill_runner.report.result import readings

Compose = Callable[..., RunConfig]
PAGE = Path(__file__).parents[1] / "docs" / "readings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m distill_runner.report.readings_page > docs/readings.md"


MINILMV2 = ("method=minilmv2", "relations.heads=8", "student.width=32", "student.heads=4", "corpus.max_length=48")


def of(compose: Compose, *overrides: str) -> list[str]:
    return readings(resolve(compose(*overrides).stages, "student", "fp32"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("method=alp",), ["intermediate.attention.scale=none: ", "kd.scale_by_t2=true: ", "optim.warmup=0.1: "]),
        (("method=prokd",), ["logits.over_classes=sum: ", "logits.steps.warmup=1: ", "route.at=end: "]),
        (MINILMV2, ["relations.over_rows=sequence: ", "corpus.examples=packed: "]),
        (("method=pdf", "student=fresh_tiny"), ["kd.scale_by_t2=true: ", "corpus.examples=pairs: ", "select=best: "]),
        (("method=pkd", "mapping=skip"), ["intermediate.mapping.rule=skip: "]),
    ],
)
def test_a_run_lists_those_that_apply_to_it(overrides: tuple[str, ...], expected: list[str], compose: Compose) -> None:
    found = of(compose, *overrides)
    for beginning in expected:
        assert any(line.startswith(beginning) for line in found), (beginning, found)


def test_no_other_is_listed(compose: Compose) -> None:
    assert not any("scale_by_t2" in line or "mapping" in line for line in of(compose, "method=nkd"))
    assert not any("mapping.rule" in line for line in of(compose, "method=alp", "mapping=all"))


def test_values_are_those_of_the_run_and_stages_are_named(compose: Compose) -> None:
    found = of(compose, "method=rkd", "loss.kd.scale_by_t2=false", "optim.warmup=0.2")
    assert any(line.startswith("kd.scale_by_t2=false: ") and line.endswith("[student]") for line in found)
    assert any(line.startswith("optim.warmup=0.2: ") and line.endswith("[student]") for line in found)
    assert any(line.startswith("optim.warmup=0.1: ") and line.endswith("[teacher]") for line in found)
