"""Assumptions: declared with the option, listed by every run that they apply to, and all on one page."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from distill_runner.api import composed
from distill_runner.common.schema import ANY_VALUE
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import DECLARING, RunConfig, assumptions_of_files, resolved_settings
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report.result import stage_assumptions
from docs._ext.assumptions_page import page, parts, schema_assumptions
from helpers.small_runs import few_fast

Compose = Callable[..., RunConfig]
PAGE = Path(__file__).parents[1] / "docs" / "assumptions.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python docs/_ext/assumptions_page.py > docs/assumptions.md"


MINILMV2 = ("method=minilmv2", "relations.heads=8", "student.width=32", "student.heads=4", "corpus.max_length=48")


def of(compose: Compose, *overrides: str) -> list[str]:
    return stage_assumptions(resolve_stage(compose(*overrides).stages, "student", "fp32"))


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


def test_another_value_is_not_what_was_taken() -> None:
    def of_files(*overrides: str) -> list[str]:
        return assumptions_of_files(resolved_settings(composed(*overrides)))

    lines = of_files("task=rte", "method=alp", "optim.warmup=0.2", "optim.name=sgd")
    assert not any(line.startswith(("optim.warmup", "optim.name")) for line in lines)
    assert any(line.startswith("optim.clip=1: ") for line in lines)
    assert not any("as BERT" in line for line in of_files("task=rte", "method=prokd"))


PLACES = r"(?:Eqs?\.|Exp|Table|Figure|[Ss]ection|Algorithm|A\.|T\^|T = )\s*[\d.]+(?: and \d+)?|\(\d\.\d\)"
NO_VALUE = re.compile(rf"{PLACES}|1x1|\b0\b|XLM-R \(CC-100\)")
"""Numbers that are no value of an option: places in papers, T^2, T = 1, 1x1 kernels, 0, a data set."""


def names_a_number(text: str) -> bool:
    """Whether a text names a number itself, instead of taking it from the configuration."""
    return bool(re.search(r"\d", NO_VALUE.sub("", re.sub(r"\$\{[^}]*\}", "", text))))


def test_an_assumption_that_names_a_number_belongs_to_a_value() -> None:
    """Else a run with another value would still say the number: "optim.epochs=5: 160 of methods without phases"."""
    of_options = [
        (name, option, assumption.text)
        for name, schema in parts()
        for option, assumption in schema_assumptions(schema)
        if assumption.value is ANY_VALUE
    ]
    of_files = []
    for file in sorted(config_folder().rglob("*.yaml")):
        content = yaml.safe_load(file.read_text()) or {}
        for part in (content, *(content.get(name) for name in DECLARING)):
            for key, entry in part.get("assumptions", {}).items() if isinstance(part, dict) else ():
                if not isinstance(entry, dict) or "value" not in entry:
                    of_files.append((file.name, key, entry["text"] if isinstance(entry, dict) else entry))
    assert of_options
    assert of_files
    assert [found for found in (*of_options, *of_files) if names_a_number(found[-1])] == []


CIFAR = ("experiment=pro_kd/cifar",)
AS_LONG = "={}: methods without phases train as long as phase I ({} x 1 + 1) and phase II ({}) together"


@pytest.mark.parametrize(
    ("overrides", "key", "line"),
    few_fast([
        (("task=rte", "method=alp"), "optim.warmup", "=0.1: a tenth of the steps, as in BERT's fine-tuning (ALP-KD)"),
        (("method=distilbert",), "method.weights.hard", "=2: gold labels in fine-tuning; "),
        (("experiment=pro_kd/distilbert", "task=mrpc", "method=checkpoint"), "recipe.paper", "=Pro-KD: the student "),
        ((*CIFAR, "method=prokd"), "student.shortcut", "=conv: 1x1 convolutions, as in TAKD's code; "),
        ((*CIFAR, "method=annealing"), "route.epochs", "=20: phase I takes 200 epochs, and phase II 100; "),
        ((*CIFAR, "method=annealing", "route.epochs=3"), "route.epochs", "=3: phase I takes 30 epochs, "),
        (("method=annealing",), "route.epochs", "=1: phase I takes 8 epochs, and phase II 10; "),
        ((*CIFAR, "method=nkd", "optim.epochs=5"), "optim.epochs", None),
        ((*CIFAR, "method=nkd"), "optim.epochs", "=160: 160 of methods without phases, "),
        ((*CIFAR, "method=nkd", "optim.schedule=linear"), "optim.schedule", None),
        (("method=vanilla",), "optim.epochs", AS_LONG.format(18, 7, 10)),
        (("method=vanilla", "task=squad"), "optim.epochs", AS_LONG.format(9, 3, 5)),
        (("method=vanilla", "optim.epochs=3"), "optim.epochs", None),
        (("method=prokd", "recipe=pro_kd_distilroberta", "task=squad"), "teacher.optim.lr", None),
        (("method=prokd",), "teacher.optim.lr", "=2e-05: the student's learning rate"),
        (("method=prokd", "task=qqp"), "task.metrics", "=[accuracy_f1, accuracy, f1]: where GLUE has two metrics"),
        (("method=prokd", "task=qqp", "task.metrics=[f1]"), "task.metrics", None),
        (("method=pd", "optim.lr=0.5"), "optim.lr", None),
        (("method=pd", "task.max_length=32"), "task.max_length", None),
        (("method=pd", "task=sst2"), "task.max_length", "=512: 128 tokens; whole documents (512)"),
        (("method=pd",), "stages.pretrain.corpus.max_length", "=128: one length for all steps; "),
        (
            ("method=pd", "pretraining=mlm_nsp_two_lengths", "pretraining.optim.max_steps=90"),
            "stages.pretrain.corpus.max_length",
            "=128: 90 steps of this length, then 100000 of 512 with new AdamW moments",
        ),
        (("method=prokd",), "student.phase1.select", "=last: phase II starts from phase I's end at T = 1 (last: "),
        (("method=annealing",), "student.phase1.select", "=best: phase II starts from phase I's best epoch (best)"),
    ], 8),
)  # fmt: skip
def test_texts_say_what_the_run_has(overrides: tuple[str, ...], key: str, line: str | None) -> None:
    """Whoever reads the assumptions of a run would be told of epochs, rates and lengths that it does not have."""
    task = [] if any(override.startswith(("task=", "experiment=")) for override in overrides) else ["task=sst2"]
    found = assumptions_of_files(resolved_settings(composed(*task, *overrides)))
    lines = [one for one in found if one.startswith(f"{key}=")]
    if line is None:
        assert lines == []
    else:
        assert any(one.startswith(key + line) for one in lines), found


def test_an_assumption_may_have_keys_of_its_author() -> None:
    declared = {"assumptions": {"student.depth": {"text": "a guess", "note": "mine"}}, "depth": 3}
    assert assumptions_of_files({"recipe": {"paper": "P"}, "student": declared}) == ["student.depth=3: a guess (P)"]


def test_the_budgets_of_pro_kds_recipes_are_those_that_the_text_derives() -> None:
    """The text says "as long as phase I and phase II together"; with other numbers, the comparison would be unfair."""
    for name in ("bert_small", "distilroberta"):
        recipe = yaml.safe_load((config_folder() / "recipe" / f"pro_kd_{name}.yaml").read_text())
        for task in ("every", "squad", "squad_v2"):
            phases = recipe["prokd"][task]
            total = phases["tau_max"] * phases["increment"] + phases["warmup"] + phases["epochs"]
            assert recipe["every"][task]["epochs"] == total, (name, task)
