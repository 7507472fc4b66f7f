"""Assumptions: declared with the option, listed by every run that they apply to, and all on one page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distill_runner.api import composed
from distill_runner.common.assumptions import applied_assumptions
from distill_runner.compose.run_config import RunConfig, assumptions_of_files, resolved_settings, typed_run
from distill_runner.pipeline.resolving import resolve
from distill_runner.report.assumptions_page import page
from distill_runner.report.result import stage_assumptions

Compose = Callable[..., RunConfig]
PAGE = Path(__file__).parents[1] / "docs" / "assumptions.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m distill_runner.report.assumptions_page > docs/assumptions.md"


MINILMV2 = ("method=minilmv2", "relations.heads=8", "student.width=32", "student.heads=4", "corpus.max_length=48")


def of(compose: Compose, *overrides: str) -> list[str]:
    run = compose(*overrides)
    return stage_assumptions(resolve(run.stages, "student", "fp32"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("method=alp",), ["intermediate.attention.scale=none: ", "kd.scale_by_t2=true: "]),
        (("method=prokd",), ["logits.over_classes=sum: ", "logits.steps.warmup=1: ", "route.moment=end: "]),
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
    found = of(compose, "method=rkd", "loss.kd.scale_by_t2=false")
    assert any(line.startswith("kd.scale_by_t2=false: ") and line.endswith("[student]") for line in found)


def test_files_of_tasks_and_corpora_declare_some() -> None:
    def of_files(*overrides: str) -> list[str]:
        run = typed_run(composed(*overrides))
        return [f"{one.key}={one.value}" for stage in run.stages.values() for one in applied_assumptions(stage)]

    found = of_files("task=wnli", "method=pdf", "corpus=roberta")
    assert {"task.max_length=128", "task.epochs=20", "corpus.name=roberta"} <= set(found)
    assert "corpus.parts.books.rows_per_document=100" in found
    assert not {"task.epochs=20", "corpus.name=roberta"} & set(of_files("task=rte", "method=alp", "corpus=roberta"))
    assert "corpus.exponent=0.7" not in of_files("method=pdf", "corpus=multilingual", "corpus.exponent=null")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task=rte", "method=alp"], "optim.warmup=0.1: a tenth of the steps, as in BERT's fine-tuning (ALP-KD)"),
        (["task=rte", "method=vanilla"], "loss.temperature=1: the paper gives none (Pro-KD)"),
        (["task=rte", "method=rco"], "route.checkpoints=null: all epochs of the teacher are its anchors (Pro-KD)"),
        (["experiment=pro_kd/cifar", "method=prokd"], "loss.over_classes=mean: as in the code of Annealing-KD; "),
        (["task=rte", "method=distilbert"], "method.weights.hard=2: gold labels in fine-tuning; "),
        (
            ["experiment=pro_kd/distilbert", "task=mrpc", "method=checkpoint"],
            "recipe.paper=Pro-KD: the student has ",
        ),
        (["experiment=pro_kd/cifar", "method=prokd"], "student.shortcut=conv: 1x1 convolutions, as in TAKD's code; "),
    ],
)
def test_files_of_configuration_declare_some(overrides: list[str], expected: str) -> None:
    found = assumptions_of_files(resolved_settings(composed(*overrides)))
    assert any(line.startswith(expected) for line in found), found


def test_another_value_is_not_what_was_taken() -> None:
    def of_files(*overrides: str) -> list[str]:
        return assumptions_of_files(resolved_settings(composed(*overrides)))

    lines = of_files("task=rte", "method=alp", "optim.warmup=0.2", "optim.name=sgd")
    assert not any(line.startswith(("optim.warmup", "optim.name")) for line in lines)
    assert any(line.startswith("optim.clip=1: ") for line in lines)
    assert not any("as BERT" in line for line in of_files("task=rte", "method=prokd"))
