"""Teachers of which only logits are read: decoders, encoder-decoders, cross-encoders with a single logit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.base import Progress
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.padded import reads_padding
from distill_runner.models.sources import read_shape
from distill_runner.pipeline.account import account_of_run, label_line
from distill_runner.pipeline.build import Pipeline, teacher_targets, teacher_temperature
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.tasks import make_task
from distill_runner.tasks.decoding import class_loss
from helpers.classifiers import TASK as THREE_CLASSES
from helpers.classifiers import save_classifier

Compose = Callable[..., RunConfig]
CAUSAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": CAUSAL | {"head_dim": 12, "pad_token_id": 0},
    "llama": CAUSAL | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 3, "eos_token_id": 3},
    "gpt_neo": {
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        **{"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
    },
    "convbert": CAUSAL | {"embedding_size": 32, "pad_token_id": 0},  # an encoder whose convolution reads the padding
    "fnet": CAUSAL | {"pad_token_id": 0},  # an encoder whose Fourier transform does
    "xlnet": {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48, "pad_token_id": 0, "initializer_range": 0.3},
    "t5": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 5},
        **{"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0},
    },
    "bart": {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128},
        **{"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2, "decoder_start_token_id": 3},
    },
}
"""Sizes of a tiny model; its texts end with the token 3, [SEP] of the tokenizer, which T5 and BART read as the end."""
TASK = make_task(**THREE_CLASSES.model_dump() | {"labels": ["no", "yes"]})


def classifier(folder: Path, family: str, tokenizer: Path, labels: Sequence[str] = ("yes", "no"), **more: Any) -> Path:
    """A tiny classifier with its tokenizer, random but for its vocabulary, saved in ``folder``."""
    settings = {"id2label": dict(enumerate(labels))} | FAMILIES.get(family, {}) | more
    return save_classifier(folder, family, tokenizer, settings, seed=3)


def singly(folder: Path, texts: Sequence[Sequence[str]]) -> Tensor:
    """Logits of transformers' own forward, each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    segments = ["token_type_ids"] if model.config.model_type in ("bert", "xlnet", "convbert", "fnet") else []
    kinds = ["input_ids", "attention_mask", *segments]
    with torch.inference_mode():
        rows = [tokenizer(*text, return_tensors="pt", truncation=True, max_length=48) for text in texts]
        return torch.cat([model(**{kind: row[kind] for kind in kinds}).logits for row in rows])


def program_logits(model: Any, folder: Path, examples: Examples, work: Path) -> Tensor:
    """Logits as training and caches read them, in the order of the examples."""
    work.mkdir()
    TokenSplit.write(work, examples, AutoTokenizer.from_pretrained(folder), 48)
    batch = TokenSplit(work).batch(range(len(examples)))
    with torch.inference_mode():
        logits = extract(model.eval(), batch, FeatureRequest(logits=True)).logits_OC
    return logits[batch.index.argsort()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_each_text_alone(
    tmp_path: Path, tiny_bert_folder: Path, tiny_examples: dict[str, Examples], family: str
) -> None:
    folder = classifier(tmp_path / "model", family, tiny_bert_folder)
    kept = build(source := ModelConfig(source=str(folder), head="keep"), TASK.head)
    assert (reads_padding(kept), read_shape(source).gives_logits_only) == (True, family not in ("convbert", "fnet"))
    examples = tiny_examples["validation"]
    expected = singly(folder, list(zip(*examples.texts, strict=True)))[:, [1, 0]]
    assert expected.std(0).min() > 1e-2
    logits = program_logits(kept, folder, examples, tmp_path / "split")
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert kept.config.get_text_config().pad_token_id == FAMILIES[family]["pad_token_id"]


def test_a_second_mark_of_the_end_is_read_as_in_that_text_alone(tmp_path: Path, tiny_bert_folder: Path) -> None:
    folder = classifier(tmp_path / "model", "t5", tiny_bert_folder)
    kept = build(ModelConfig(source=str(folder), head="keep"), TASK.head)
    texts = ["one [SEP] two", "one two three", "one"]
    logits = program_logits(kept, folder, Examples([texts], None), tmp_path / "split")
    torch.testing.assert_close(logits, singly(folder, [[text] for text in texts])[:, [1, 0]], rtol=1e-5, atol=1e-5)


def test_a_text_without_tokens_is_refused(tmp_path: Path, tiny_bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="row 1 is an empty text"):
        TokenSplit.write(tmp_path, Examples([["one", ""]], None), tokenizer, 48)


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(("name", "place"), [("yes", 1), ("No", 0)])
def test_a_single_logit_is_that_of_the_class_it_is_named_after(
    tmp_path: Path, tiny_bert_folder: Path, tiny_examples: dict[str, Examples], name: str, place: int
) -> None:
    """A cross-encoder: the probability is the sigmoid of its logit, as transformers' pipeline computes it."""
    folder = classifier(tmp_path / "model", "bert", tiny_bert_folder, [name], **BERT)
    kept = build(ModelConfig(source=str(folder), head="keep"), TASK.head)
    examples = tiny_examples["validation"]
    logits = program_logits(kept, folder, examples, tmp_path / "split")
    expected = singly(folder, list(zip(*examples.texts, strict=True)))[:, 0].sigmoid()
    assert expected.std() > 1e-2
    torch.testing.assert_close(logits.softmax(-1)[:, place], expected, rtol=1e-5, atol=1e-5)
    kept.save_pretrained(tmp_path / "saved")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert list(again.config.id2label.values()) == ["no", "yes"]
    assert not again.classifier.weight[1 - place].any()


@pytest.mark.parametrize(
    ("names", "labels", "text"),
    [
        (("Yes", "NO"), None, "no = output 1 (NO), yes = output 0 (Yes)"),
        (("LABEL_0", "LABEL_1"), ["yes", "no"], "no = output 1 (no), yes = output 0 (yes); outputs named by"),
        (("yes",), None, "no = the rest, yes = sigmoid of output 0 (yes)"),
    ],
)
def test_matches_of_labels_are_in_the_account(
    names: tuple[str, ...],
    labels: list[str] | None,
    text: str,
    compose: Compose,
    tmp_path: Path,
    tiny_bert_folder: Path,
) -> None:
    """So that a plan shows them; one that fits no class is refused there, before anything is loaded."""
    folder = classifier(tmp_path / "model", "bert", tiny_bert_folder, names, **BERT)
    options = ["method=rkd", f"teacher.source={folder}", "teacher.fine_tuned=true"]
    options += ["teacher.labels=['yes','no']"] if labels else []
    run = compose(*options)
    stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
    inputs = Pipeline(Store(run.store.dir), run.runtime).inputs
    (line,) = filter(None, (label_line(part, inputs) for part in stage.in_build_order))
    assert f"{folder}: {text}" in str(line)
    assert line in account_of_run(stage, inputs)
    other = classifier(tmp_path / "other", "bert", tiny_bert_folder, ("a", "b"), **BERT)
    run = compose("method=rkd", f"teacher.source={other}", "teacher.fine_tuned=true")
    with pytest.raises(UserError, match="not named like the classes"):
        account_of_run(resolve_stage(run.stages, run.stage, run.runtime.precision), inputs)


@pytest.mark.parametrize(
    ("family", "names", "labels", "message"),
    [
        ("qwen3", ["LABEL_0", "LABEL_1"], None, r"\[LABEL_0,LABEL_1\] are not named like the classes of tiny"),
        ("llama", ["a", "b", "c"], None, r"has 3 outputs \[a,b,c\], the task tiny needs 2 \[no,yes\]"),
        ("llama", ["a", "b", "c"], ["no", "yes"], r"names 2 outputs, but the head of .* has 3: \[a,b,c\]"),
        ("t5", ["LABEL_0"], None, r"\[LABEL_0\] are not named like the classes of tiny"),
    ],
)
def test_outputs_that_match_no_class_are_refused(
    tmp_path: Path, tiny_bert_folder: Path, family: str, names: list[str], labels: list[str] | None, message: str
) -> None:
    folder = classifier(tmp_path / "model", family, tiny_bert_folder, names)
    with pytest.raises(UserError, match=message):
        build(ModelConfig(source=str(folder), head="keep", labels=labels), TASK.head)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, tiny_bert_folder: Path) -> dict[str, Path]:
    """Tiny classifiers whose classes are those of the tiny task, by family."""
    root = tmp_path_factory.mktemp("teachers")
    return {family: classifier(root / family, family, tiny_bert_folder) for family in ("qwen3", "t5")}


def overrides(teacher: Path, student: Path, method: str = "rkd") -> list[str]:
    values = [f"method={method}", f"teacher.source={teacher}", "teacher.fine_tuned=true", "optim.epochs=1"]
    return [*values, f"student.init.source={student}"]


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_cached_and_live_targets_are_equal(
    compose: Compose, teachers: dict[str, Path], tiny_bert_folder: Path, family: str
) -> None:
    run = compose(*overrides(teachers[family], tiny_bert_folder), "loss.eta=1")
    stage = resolve_stage(run.stages, "student", "fp32")
    outputs = {}
    for mode in ("cached", "live"):
        runtime = run.runtime.model_copy(update={"targets": mode})
        pipeline = Pipeline(Store(run.store.dir), runtime)
        targets, data = teacher_targets(stage, pipeline), pipeline.inputs.data(stage)
        batches = [data.batch(torch.arange(first, first + 9).numpy(), 0) for first in (0, 9, 18)]
        features = [targets(batch, Progress(0, 0, 1, 1), stage.teacher_needs) for batch in batches]
        outputs[mode] = torch.cat([part.logits for part in features if part.logits is not None])
    torch.testing.assert_close(outputs["cached"], outputs["live"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["method=alp"], r"method.terms.\w+: a teacher of type qwen3 gives logits only, but the method reads more"),
        (["method=tinybert"], r"method.terms.\w+: a teacher of type qwen3 gives logits only"),
        (["teacher.fine_tuned=false"], "a qwen3 is not a bidirectional text encoder\n.*teacher.fine_tuned=true"),
        (["teacher.optim.epochs=1"], "a qwen3 cannot be trained"),
        (["student.init.source=pretrained"], "a qwen3 is not a bidirectional text encoder"),
        (["student.init.source=stage:teacher"], "so no other model starts from it"),
    ],
)
def test_what_such_a_model_cannot_do_is_refused(
    compose: Compose, teachers: dict[str, Path], tiny_bert_folder: Path, values: list[str], message: str
) -> None:
    run = compose(*overrides(teachers["qwen3"], tiny_bert_folder), *values)
    with pytest.raises(UserError, match=message) as error:
        resolve_stage(run.stages, "student", "fp32")
    assert str(error.value).count("\n") <= 1


def test_a_calibrated_teacher_has_the_temperature_that_fits(
    compose: Compose, teachers: dict[str, Path], tiny_bert_folder: Path
) -> None:
    """A minimum; the outputs that a student reads are the cached ones divided by it."""
    run = compose(*overrides(teachers["qwen3"], tiny_bert_folder), "teacher.calibrate=true")
    stage, plain = (
        resolve_stage(compose_run.stages, "student", "fp32")
        for compose_run in (run, compose(*overrides(teachers["qwen3"], tiny_bert_folder)))
    )
    assert stage.config.task is not None
    assert stage.spec == {**plain.spec, "calibrated_on": next(iter(stage.config.task.validation))}
    task = stage.config.task.model_copy(update={"validation": {"b": "validation", "a": "validation"}})
    several = replace(stage, config=stage.config.model_copy(update={"task": task}))
    assert several.spec["calibrated_on"] == "b", "the store sorts the names of the splits"
    builder = Pipeline(Store(run.store.dir), run.runtime)
    temperature = teacher_temperature(stage, builder)
    assert stage.teacher is not None
    outputs = np.load(builder.build(stage.teacher) / "predictions-validation.npy").astype(np.float64)
    labels = np.asarray(builder.inputs.split(stage.teacher, "validation").labels)

    losses = [class_loss(outputs / (temperature * factor), labels) for factor in (0.999, 1.0, 1.001)]
    assert losses[1] == min(losses), "the loss is convex"
    batch = builder.inputs.data(stage).batch(np.arange(16), 0)
    targets = [teacher_targets(one, builder)(batch, Progress(0, 0, 1, 1), one.teacher_needs) for one in (stage, plain)]
    scaled, raw = (features.logits for features in targets)
    assert scaled is not None
    assert raw is not None
    assert abs(temperature - 1) > 0.1
    torch.testing.assert_close(scaled * temperature, raw)
