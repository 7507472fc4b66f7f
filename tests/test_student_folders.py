"""A student's folder holds what its score depends on: other programs give the same for texts of any length."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

from distill_runner.common.seeds import preserved_random_state
from distill_runner.datasets.tokenization import Examples, save_tokenizer
from distill_runner.models.build import build, load_model
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import resolve_source
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.store import Store
from distill_runner.tasks import make_task
from distill_runner.training.data import predict
from distill_runner.training.devices import Device
from helpers.built_runs import student
from helpers.small_runs import Compose
from helpers.words import WORDS

LENGTHS = [1, 2, 7, 11, 12, 40, 70, 200]
TYPES: dict[str, dict[str, Any]] = {
    "classification": {"labels": ["no", "yes", "maybe"]},
    "multilabel": {"labels": ["no", "yes", "maybe"], "label": ["no", "yes", "maybe"]},
    "regression": {},
}


def texts(columns: int) -> list[list[str]]:
    rng = random.Random(0)
    return [[" ".join(rng.choices(WORDS, k=length)) for length in LENGTHS] for _ in range(columns)]


@pytest.fixture(scope="module")
def inherited(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source whose tokenizer pads each text to 60 tokens, and cuts at 60."""
    folder = tmp_path_factory.mktemp("inherited") / "model"
    shutil.copytree(tiny_bert_folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 60, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 60}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def with_side(folder: Path, side: str, target: Path) -> Path:
    """A copy of a model's folder whose tokenizer cuts texts on one side."""
    shutil.copytree(folder, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": side}))
    return target


def own_probabilities(task: Any, folder: Path, columns: list[list[str]], scratch: Path) -> np.ndarray:
    """What ``predict`` writes: probabilities of classes, or scores."""
    scratch.mkdir()
    task.write(scratch, Examples(columns, None), resolve_source(str(folder)).tokenizer())
    outputs = predict(load_model(folder, task.head), task.open(scratch), Device.from_name("cpu", "fp32"))
    return task.decoding.probabilities(outputs) if task.has_classes else outputs


def of_pipeline(task: Any, folder: Path, columns: list[list[str]]) -> np.ndarray:
    """The same by the lines of a student's card."""
    model: Any = pipeline("text-classification", model=str(folder), truncation=True)
    rows = [dict(zip(("text", "text_pair"), row, strict=False)) for row in zip(*columns, strict=True)]
    scores = [{one["label"]: one["score"] for one in model(row, top_k=None)} for row in rows]
    return np.array([[row[name] for name in task.head.names] for row in scores])


@pytest.mark.parametrize(
    ("kind", "columns", "side"),
    [
        ("classification", 1, "left"),
        ("classification", 2, "right"),
        ("multilabel", 2, "left"),
        ("regression", 1, "right"),
    ],
)
def test_the_pipeline_gives_what_predict_gives(
    kind: str, columns: int, side: str, inherited: Path, tmp_path: Path
) -> None:
    source = with_side(inherited, side, tmp_path / "source")
    fields = TYPES[kind] | {"columns": ["sentence1", "sentence2"][:columns], "max_length": 12, "dataset": "d"}
    task = make_task(name="own", type=kind, metrics=None, epochs=1, validation={"v": "v"}, **fields)
    folder = tmp_path / "model"
    torch.manual_seed(1)
    build(ModelConfig(source=str(source)), task.head).save_pretrained(folder)
    save_tokenizer(resolve_source(str(source)).tokenizer(), folder, task.num_positions)
    own = own_probabilities(task, folder, texts(columns), tmp_path / "texts")
    assert own == pytest.approx(of_pipeline(task, folder, texts(columns)), abs=2e-6)
    assert own[3:].std(0).min() > 1e-4


def test_a_stage_saves_its_tokenizer_as_trained(compose: Compose, inherited: Path, tmp_path: Path) -> None:
    source = with_side(inherited, "left", tmp_path / "source")
    run = compose("method=rkd", f"teacher.source={source}", "optim.max_steps=1", "teacher.optim.max_steps=1")
    stage = student(run)
    with preserved_random_state():
        folder = Pipeline(Store(run.store.dir), run.runtime).build(stage) / "model"
    content = json.loads((folder / "tokenizer.json").read_text())
    assert content["padding"] is None
    assert (content["truncation"]["max_length"], content["truncation"]["direction"]) == (48, "Left")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.model_max_length, tokenizer.truncation_side) == (48, "left")
    assert stage.config.task is not None
    own = own_probabilities(stage.config.task, folder, texts(2), tmp_path / "texts")
    assert own == pytest.approx(of_pipeline(stage.config.task, folder, texts(2)), abs=2e-6)
