"""Well-read students: what is pre-trained, distilled and fine-tuned, end to end on the embedded text."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.base import Progress
from distill_runner.methods.outputs import Classes
from distill_runner.methods.predictions import NextSentence
from distill_runner.models.build import build, count_parameters
from distill_runner.models.config import LANGUAGE_MODEL, PRE_TRAINING, ModelConfig
from distill_runner.models.extract import extract
from distill_runner.models.features import EncoderShape, FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from helpers.built_runs import share_texts

Compose = Callable[..., RunConfig]
SMALL = ("student.layers=2", "student.width=16", "student.heads=2", "corpus.max_length=24", "task.max_length=24")
FEW = ("pretraining.optim.max_steps=4", "pretraining.optim.batch_size=8", "optim.max_steps=3", "optim.batch_size=8")
SLOW = pytest.mark.slow
OFFLINE = ("corpus=embedded", "task=demo_sentences", "transfer=demo_sentences", "transfer.size=60")


@pytest.fixture(scope="module")
def run(compose: Compose, tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    teacher = ("teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.optim.max_steps=2")
    texts = tmp_path_factory.mktemp("texts")
    return lambda *overrides: share_texts(compose(*OFFLINE, *SMALL, *FEW, *teacher, *overrides, tiny=False), texts)


class Built:
    """A run's student, and the stages that were trained for it, each with its losses."""

    def __init__(self, run: RunConfig) -> None:
        self.losses: dict[str, list[Mapping[str, Any]]] = {}
        self.stage = resolve_stage(run.stages, "student", "fp32")
        runtime = run.runtime.model_copy(update={"log_every": 1})
        self.pipeline = Pipeline(Store(run.store.dir), runtime, self.report)
        self.folder = self.pipeline.build(self.stage)

    def report(self, name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        points = self.losses.setdefault(name, [])
        return lambda values, step, epoch: points.append(values) if "loss" in values else None

    def terms(self, name: str) -> set[str]:
        return {key for point in self.losses[name] for key in point if key.startswith("loss/")}

    def weights(self, stage: Stage) -> dict[str, torch.Tensor]:
        return load_file(self.pipeline.build(stage) / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "trained"),
    [
        pytest.param("basic", {"student": "ce"}, marks=SLOW),
        pytest.param("kd", {"teacher": "ce", "student": "kd"}, marks=SLOW),
        pytest.param("pf", {"pretrain": "mlm+", "student": "ce"}, marks=SLOW),
        ("pd", {"pretrain": "mlm+", "teacher": "ce", "student": "kd"}),
        pytest.param("pdf", {"pretrain": "mlm+", "teacher": "ce", "distil": "kd", "student": "ce"}, marks=SLOW),
        pytest.param("pd_embeddings", {"pretrain": "mlm+", "teacher": "ce", "student": "kd"}, marks=SLOW),
        pytest.param("pd_truncated", {"pretrain": "mlm+", "teacher": "ce", "student": "kd"}, marks=SLOW),
    ],
)
def test_a_method_is_its_stages(method: str, trained: dict[str, str], run: Callable[..., RunConfig]) -> None:
    built = Built(run(f"method={method}"))
    assert list(built.losses) == list(trained)
    for stage, terms in trained.items():
        expected = {"mlm+": {"loss/masked_lm", "loss/next_sentence"}}.get(terms, {f"loss/{terms}"})
        assert built.terms(stage) == expected
    measured = json.loads((built.folder / "metrics.json").read_text())
    assert set(measured["metrics"]) == {"accuracy", "f1"}
    assert measured["shape"]["num_layers"] == 2


@pytest.mark.slow
def test_berts_two_lengths_are_two_stages(run: Callable[..., RunConfig]) -> None:
    """BERT A.2: 128 tokens for 90 % of the steps, 512 for the rest; the second stage takes over both heads."""
    stages = run("method=pf", "pretraining=mlm_nsp_two_lengths", "pretraining.optim.max_steps=900000").stages
    short, long = stages["pretrain"], stages["pretrain_long"]
    assert short.optim.max_steps == 9 * (long.optim.max_steps or 0)
    assert short.corpus is not None
    assert long.corpus == short.corpus.model_copy(update={"max_length": 512})
    assert (short.optim.lr, long.optim.lr, long.optim.warmup) == (1e-4, 1e-5, 0.0)

    of_long = ("stages.pretrain_long.corpus.max_length=40", "stages.pretrain_long.optim.max_steps=2")
    built = Built(run("method=pf", "pretraining=mlm_nsp_two_lengths", *of_long, "stages.pretrain_long.optim.lr=1e-30"))
    assert list(built.losses) == ["pretrain", "pretrain_long", "student"]
    assert built.terms("pretrain_long") == {"loss/masked_lm", "loss/next_sentence"}
    last = built.stage.source_stage
    assert last is not None
    assert last.source_stage is not None
    first, second = built.weights(last.source_stage), built.weights(last)
    assert {"cls.predictions.bias", "cls.seq_relationship.weight"} <= first.keys()
    assert first.keys() == second.keys()
    assert all(torch.allclose(second[name], first[name], rtol=0, atol=1e-20) for name in first)


@pytest.mark.slow
def test_pdf_fine_tunes_what_it_distilled_head_and_all(run: Callable[..., RunConfig]) -> None:
    built = Built(run("method=pdf", "optim.lr=1e-30"))
    assert built.stage.source_stage is not None
    distilled, student = built.weights(built.stage.source_stage), built.weights(built.stage)
    assert all(torch.allclose(student[name], distilled[name], rtol=0, atol=1e-20) for name in distilled)


def test_models_of_one_size_are_pre_trained_once(run: Callable[..., RunConfig]) -> None:
    def pretrained(method: str, layers: int) -> str:
        stage = resolve_stage(run(f"method={method}", f"student.layers={layers}").stages, "student", "fp32")
        assert stage.source_stage is not None
        return stage.source_stage.key

    assert pretrained("pd_truncated", 2) == pretrained("pd_truncated", 4) == pretrained("pd", 12)
    assert pretrained("pd_embeddings", 2) == pretrained("pd_embeddings", 4) != pretrained("pd", 2)


@pytest.mark.slow
def test_the_backbone_is_carried_over_and_the_head_is_new(run: Callable[..., RunConfig]) -> None:
    still = "teacher.optim.max_steps=1", "optim.epochs=0"
    built = Built(run("method=pd", *still))
    assert built.stage.source_stage is not None
    before, after = built.weights(built.stage.source_stage), built.weights(built.stage)
    shared = [name for name in after if name.startswith("bert.")]
    assert all(torch.equal(before[name], after[name]) for name in shared)
    assert "bert.pooler.dense.weight" in shared  # trained by next sentence prediction
    assert {name.split(".")[0] for name in after.keys() - before.keys()} == {"classifier"}
    embeddings = Built(run("method=pd_embeddings", *still))
    assert embeddings.stage.source_stage is not None
    before, after = embeddings.weights(embeddings.stage.source_stage), embeddings.weights(embeddings.stage)
    same = {name for name in after if name in before and torch.equal(before[name], after[name])}
    assert {name for name in same if "weight" in name and "LayerNorm" not in name} == {
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }


def test_a_pre_training_that_was_killed_has_the_same_curve(run: Callable[..., RunConfig]) -> None:
    options = run("method=pretrain", "runtime.checkpoint_steps=1", "corpus.whole_word=true")
    stage = resolve_stage(options.stages, "student", "fp32")
    runtime = options.runtime.model_copy(update={"log_every": 1})
    logged: list[tuple[int, float]] = []

    def report(kill_at: int | None) -> Callable[[str], Callable[[Mapping[str, Any], int, float], None]]:
        def log(values: Mapping[str, Any], step: int, epoch: float) -> None:
            logged.extend([(step, values["loss"])] if "loss" in values else [])
            if step == kill_at:
                raise MemoryError

        return lambda name: log

    with pytest.raises(MemoryError):
        Pipeline(Store(options.store.dir), runtime, report(kill_at=3)).build(stage)
    folder = Pipeline(Store(options.store.dir), runtime, report(kill_at=None)).build(stage)
    assert [step for step, _ in logged] == [1, 2, 3, 3, 4]  # the third was not saved yet
    whole = Built(run("method=pretrain", "corpus.whole_word=true"))
    expected = [point["loss"] for point in whole.losses["student"]]
    assert [loss for _, loss in logged] == [*expected[:3], *expected[2:]]
    assert (folder / "metrics.json").exists()
    assert_equal_weights(folder, whole.folder)


def assert_equal_weights(first: Path, second: Path) -> None:
    weights, others = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
def test_a_transfer_set_shares_the_teacher_with_all_others(run: Callable[..., RunConfig]) -> None:
    sizes = ("transfer.size=60", "transfer.size=50")
    stages = [resolve_stage(run("method=kd", size).stages, "student", "fp32") for size in sizes]
    assert stages[0].key != stages[1].key
    assert stages[0].teacher is not None
    assert stages[1].teacher is not None
    assert stages[0].teacher.key == stages[1].teacher.key


@pytest.mark.slow
def test_a_pre_trained_folder_or_stage_starts_any_method(run: Callable[..., RunConfig], compose: Compose) -> None:
    pretrained = Built(run("method=pretrain", "student.width=32"))
    measured = json.loads((pretrained.folder / "metrics.json").read_text())
    assert set(measured["metrics"]) == {"masked_accuracy", "perplexity", "next_sentence_accuracy"}
    source = f"student.init.source={pretrained.folder / 'model'}"
    alp = Built(run("method=alp", "student=fresh", source))
    assert alp.terms("student") == {"loss/ce", "loss/kd", "loss/intermediate"}
    whole = "student=fresh", "student.init.source=stage:pretrain", "student.width=32"
    by_stage = Built(run("method=alp", "+stages@stages.pretrain=pretrain", *whole))
    assert list(by_stage.losses) == ["pretrain", "teacher", "student"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=basic", "stages.student.transfer=${transfer}"], "its examples have no labels"),
        (["method=pf", "corpus.examples=packed"], "corpus.examples=packed: this method reads pairs"),
        (["method=pf", "corpus.max_length=1024"], "corpus.max_length=1024: the model reads at most 512 tokens"),
        (["method=pretrain", "student.architecture.model_type=electra"], ".next_sentence: a model of type electra"),
        (["method=pf", "pretraining.optim.max_steps=null"], "optim.max_steps: needs a value if epochs is null"),
        (["method=pf", "corpus.vocab_size=null", "student.tokenizer=corpus"], "corpus.vocab_size"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str, run: Callable[..., RunConfig]) -> None:
    with pytest.raises(UserError) as caught:
        resolve_stage(run(*overrides).stages, "student", "fp32")
    assert message in str(caught.value)


# Numbers.


def test_next_sentence_is_what_transformers_computes(run: Callable[..., RunConfig]) -> None:
    built = Built(run("method=pretrain"))
    model = build(ModelConfig(source=str(built.folder / "model")), PRE_TRAINING).double().eval()
    tokens = built.pipeline.inputs.split(built.stage, "validation")
    assert isinstance(tokens, TokenSplit)
    batch = tokens.batch(range(12))
    term = NextSentence()
    term.bind(EncoderShape.from_config(model.config), None, Classes())
    batch = replace(batch, head_tokens=torch.tensor([1, 2]))
    found = term(extract(model, batch, FeatureRequest(next_sentence=True)), Features(), batch, Progress(0, 0, 1, 1))
    ids, segments, mask = batch.to_padded()
    reference: Any = model
    expected = reference(ids, mask, segments).seq_relationship_logits
    assert batch.is_next is not None
    assert found.item() == pytest.approx(torch.nn.functional.cross_entropy(expected, batch.is_next).item(), abs=1e-12)


BACKBONES = {"6x384": 22.6, "6x768": 66.4, "12x384": 25.3, "12x768": 108.9}
"""Millions without a head or pooler; the paper prints 66 and 109 for the wide ones (MiniLMv2, Tables 2 and 3)."""


def architecture(run: RunConfig) -> ModelConfig:
    return run.stages["student"].model.model_copy(update={"source": None})


@pytest.mark.parametrize("size", BACKBONES)
def test_the_students_of_minilm_v2(size: str, compose: Compose) -> None:
    model = architecture(compose("method=basic", f"student=minilm_{size}", tiny=False))
    with torch.device("meta"):
        built = build(model, LANGUAGE_MODEL)
    layers, width = map(int, size.split("x"))
    shape = EncoderShape.from_config(built.config)
    assert (shape.num_layers, shape.width, shape.num_heads) == (layers, width, 12)
    pooler = sum(p.numel() for name, p in built.base_model.named_parameters() if "pooler" in name)
    assert round((count_parameters(built.base_model) - pooler) / 1e6, 1) == BACKBONES[size]
