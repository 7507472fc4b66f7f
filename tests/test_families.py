"""Every method on every family of encoders: it trains, or is refused before anything is trained, with its reason.

The outcome is the table of docs/families.md. To write it anew: ``DISTILL_WRITE_DOCS=1 pytest tests/test_families.py``.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.common.terminal import markdown_table
from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.models.families import PACKED
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from helpers.families import FAMILIES, config_of

DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"
PAGE = Path(__file__).parent / "helpers" / "families_page.txt"
WRITES = bool(os.environ.get("DISTILL_WRITE_DOCS"))
STEPS = [
    "teacher.optim.epochs=1",
    "optim.max_steps=2",
    "optim.batch_size=16",
    "runtime.log_every=1",
    "student.num_layers=2",
]
FRESH = ["student.width=32", "student.heads=4"]
OF_TEXT = ["corpus=embedded", "+corpus.parts.embedded.limit=20", "corpus.max_length=48"]
PRETRAINED = ["pretraining.optim.max_steps=2", "pretraining.optim.batch_size=8", *FRESH]
DISTILLED = ["stages.distil.optim.max_steps=2", "stages.distil.optim.batch_size=8", *FRESH, *OF_TEXT]
VALUES = {
    "takd": ["assistant.num_layers=3"],
    "tinybert": ["stages.phase1.optim.max_steps=2"],
    "minilm": DISTILLED,
    "minilmv2": [*DISTILLED, "relations.heads=8"],
}
for _name in ("basic", "kd", "pd", "pd_embeddings", "pd_truncated", "pdf", "pf", "pretrain"):
    VALUES[_name] = [*PRETRAINED, *OF_TEXT]


@pytest.fixture(scope="module")
def teachers(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family: a backbone of 4 layers of 32 with the tokenizer of the tiny BERT."""
    root = tmp_path_factory.mktemp("families")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    for family in FAMILIES:
        config = config_of(family, 4, vocab_size=len(tokenizer), initializer_range=0.1)
        torch.manual_seed(0)
        model: Any = AutoModel.from_config(config)
        model.save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: a teacher is trained once for all methods."""
    return tmp_path_factory.mktemp("store")


def outcome(compose: Callable[..., RunConfig], method: str, teacher: Path, store: Path) -> str:
    """``trains``, or the reason why not, which comes before anything is trained."""
    values = [*STEPS, *VALUES.get(method, [])]
    run = compose(f"method={method}", *values, f"teacher.source={teacher}", f"store.dir={store}")
    try:
        stage = resolve_stage(run.stages, "student", "fp32")
    except UserError as error:
        return error.problem
    points = list[Mapping[str, Any]]()

    def report(_name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: points.append(values)

    pipeline = Pipeline(Store(run.store.dir), run.runtime, report)
    is_new = not pipeline.store.has(stage.spec)  # one anchor of RCO is the search for a checkpoint
    pipeline.build(stage)
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses or not is_new
    assert all(math.isfinite(loss) for loss in losses)
    return "trains"


@pytest.mark.slow
@pytest.mark.parametrize("method", choices("method"))
def test_a_method_trains_or_is_refused(
    compose: Callable[..., RunConfig], teachers: dict[str, Path], store: Path, method: str
) -> None:
    found = {family: outcome(compose, method, folder, store) for family, folder in teachers.items()}
    if WRITES:
        _write(method, found)
    assert _read()[method] == found


def _read() -> dict[str, dict[str, str]]:
    """The outcomes of the document: method -> family -> ``trains`` or the reason."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    reasons = dict(re.findall(r"^\((\d+)\) (.+)$", text, re.MULTILINE))
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    if not rows:
        return {}
    (_, *families), *rows = rows
    outcomes = {"yes": "trains"} | {f"({number})": reason for number, reason in reasons.items()}
    return {
        method: {family: outcomes[cell] for family, cell in zip(families, cells, strict=True)}
        for methods, *cells in rows
        for method in re.split("[`, ]+", methods)
        if method in choices("method")
    }


def _write(method: str, found: dict[str, str]) -> None:
    table = _read() | {method: found}
    reasons = sorted({cell for row in table.values() for cell in row.values() if cell != "trains"})
    mark = {"trains": "yes"} | {reason: f"({number})" for number, reason in enumerate(reasons, start=1)}
    header = ["method", *(f"`{family}`" for family in FAMILIES)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(table):
        groups.setdefault(tuple(mark[table[name].get(family, "trains")] for family in FAMILIES), []).append(name)
    rows = [[", ".join(f"`{name}`" for name in names), *cells] for cells, names in groups.items()]
    notes = [f"{mark[reason]} {reason}" + "\n" for reason in reasons]
    packed = ", ".join(f"`{family}`" for family in FAMILIES if family in PACKED)
    page = markdown_table(header, rows, text_columns=len(header))
    DOCUMENT.write_text(PAGE.read_text().format(table=page, reasons="\n".join(notes), packed=packed))
