"""Students with a trimmed vocabulary: keys, teachers of the full vocabulary, training, and the saved model."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distill_runner.analysis.finished_run import FinishedRun
from distill_runner.common.errors import UserError
from distill_runner.pipeline.account import account_of_run
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage, TrimmedTokenizer
from distill_runner.pipeline.store import Store
from helpers.small_runs import Compose

TRIM = "student.vocabulary=trim"
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"


def prepared(compose: Compose, *overrides: str) -> tuple[Stage, Pipeline]:
    run = compose(*overrides)
    return resolve_stage(run.stages, run.stage, run.runtime.precision), Pipeline(Store(run.store.dir), run.runtime)


@pytest.fixture(scope="module")
def half_folder(tiny_task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task with half of its words in the training texts, and one more at the end of a long text."""
    folder = tmp_path_factory.mktemp("half")
    words = sorted(
        {word for word in re.findall("[a-z]+", (tiny_task_folder / "train.csv").read_text()) if len(word) > 3}
    )
    rows = [f"{words[n % 4]} {words[(n + 1) % 5]},{words[n % 6]},{('no', 'yes')[n % 2]}" for n in range(15)]
    rows.append(f"{' '.join(words[:6])} {words[-1]},{words[0]},yes")
    (folder / "train.csv").write_text("\n".join(["sentence1,sentence2,label", *rows]) + "\n")
    lines = (tiny_task_folder / "validation.csv").read_text().splitlines(keepends=True)
    (folder / "validation.csv").write_text("".join(lines[:17]))
    return folder


SLOW = [pytest.param(f"method={name}", marks=pytest.mark.slow) for name in ("rkd", "alp")]


@pytest.mark.parametrize("method", ["method=tinybert", *SLOW])
def test_the_trained_student_is_that_of_the_full_vocabulary_without_rows(
    compose: Compose, half_folder: Path, method: str, tmp_path: Path
) -> None:
    """With a teacher's predictions, its [CLS] states and the states of all its tokens; the teacher is the same one."""
    extra = ["stages.phase1.optim.max_steps=2", "transfer=labeled"] if method == "method=tinybert" else []
    common = [method, f"task.dataset={half_folder}", "task.test=null", "optim.max_steps=6", "teacher.optim.max_steps=2",
              "stages.student.select=last", "optim.batch_size=4", *extra]  # fmt: skip
    folders, stages = [], []
    store = tmp_path / "store"
    for vocabulary in ("full", "trim"):
        stage, pipeline = prepared(compose, *common, f"student.vocabulary={vocabulary}")
        pipeline = Pipeline(Store(store), pipeline.runtime)
        pipeline.prepare(stage)
        folders.append(pipeline.build(stage) / "model")
        stages.append(stage)
    full, trimmed = stages
    assert full.key != trimmed.key
    assert full.teacher is not None
    assert trimmed.teacher is not None
    assert full.teacher.key == trimmed.teacher.key
    teacher = trimmed.teacher
    assert isinstance(trimmed.tokenizer, TrimmedTokenizer)
    _, remaining = pipeline.inputs.trimmed(trimmed.tokenizer)
    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    assert len(new[EMBEDDINGS]) == len(remaining) < len(old[EMBEDDINGS])
    trained: Any = pipeline.inputs.split(full, "train").token_ids
    rows = np.flatnonzero(np.isin(remaining, trained))
    torch.testing.assert_close(new.pop(EMBEDDINGS)[rows], old.pop(EMBEDDINGS)[remaining[rows]], rtol=1e-5, atol=1e-6)
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor, rtol=1e-4, atol=1e-5)
    assert (folders[1] / "model.safetensors").stat().st_size < (folders[0] / "model.safetensors").stat().st_size
    states = [FinishedRun(tmp_path, "", one, pipeline).states(teacher, [4], np.arange(5)) for one in stages]
    assert np.array_equal(states[0][4], states[1][4]), "an analysis shows the teacher its own tokens"
    texts = [row.split(",")[:2] for row in (half_folder / "train.csv").read_text().splitlines()[1:]]
    assert_same_outputs(folders, texts)


def assert_same_outputs(folders: list[Path], texts: list[list[str]]) -> None:
    outputs = []
    for folder in folders:
        tokenizer, model = (
            AutoTokenizer.from_pretrained(folder),
            AutoModelForSequenceClassification.from_pretrained(folder),
        )
        encoded = tokenizer(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt")
        with torch.no_grad():
            outputs.append(model.eval()(**encoded).logits)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_scores_and_account_are_those_of_the_trimmed_student(compose: Compose, half_folder: Path) -> None:
    """Predictions for validation are those of the saved model with its saved tokenizer."""
    stage, pipeline = prepared(
        compose, "method=nkd", f"task.dataset={half_folder}", "task.test=null", "optim.max_steps=4", TRIM
    )
    (line,) = [line for line in account_of_run(stage, pipeline.inputs) if line.topic == "tokens"]
    assert line.text.endswith("which are counted when these are tokenized")
    pipeline.prepare(stage)
    (line,) = [line for line in account_of_run(stage, pipeline.inputs) if line.topic == "tokens"]
    folder = pipeline.build(stage)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    rows = [row.split(",")[:2] for row in (half_folder / "validation.csv").read_text().splitlines()[1:]]
    full = pipeline.inputs.tokenizer(stage.with_full_vocabulary)
    changed = 0
    for number, (first, second) in enumerate(rows):
        encoded = tokenizer(first, second, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            np.testing.assert_allclose(
                model(**encoded).logits[0], np.load(folder / "predictions-validation.npy")[number], rtol=1e-4, atol=1e-5
            )
        changed += tokenizer.convert_ids_to_tokens(encoded["input_ids"][0]) != full.convert_ids_to_tokens(
            full(first, second, truncation=True, max_length=48)["input_ids"]
        )
    assert 0 < changed <= len(rows)
    size = model.config.vocab_size
    assert line.details["tokens"] == size == len(tokenizer)
    assert line.details["changed"] == {"validation": changed}
    assert line.details["parameters_removed"] == 32 * (len(full) - size)
    assert f"{size} of {len(full)} tokens remain" in line.text
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["shape"]["vocab_size"] == size
    assert metrics["num_params"] == sum(parameter.numel() for parameter in model.parameters())


def test_what_cannot_be_trimmed(compose: Compose) -> None:
    with pytest.raises(UserError, match="trained on the corpus") as error:
        prepared(
            compose,
            "method=pd",
            "student=fresh_tiny",
            "corpus.max_length=48",
            "stages.pretrain.model.vocabulary=trim",
            "student.tokenizer=corpus",
        )
    assert error.value.key == "stages.pretrain.model.vocabulary"
    with pytest.raises(UserError, match="has a trimmed vocabulary already"):
        prepared(compose, "method=prokd", "stages.phase1.model.vocabulary=trim", TRIM)
