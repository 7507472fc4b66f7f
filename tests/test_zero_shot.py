"""``teacher=zero_shot``: equal to the zero-shot pipeline of transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, pipeline

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.batches import Batch, length_groups
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.build import build, load_model
from distill_runner.models.config import Head, ModelConfig, ZeroShot
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.zero_shot import ZeroShotClassifier, with_suffix
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import targets_spec
from distill_runner.tasks import make_task
from helpers.classifiers import save_classifier

Compose = Callable[..., RunConfig]
CLASSES, TEMPLATE = ["the old", "a river", "some words"], "It says {}."
BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BART: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2, "decoder_start_token_id": 3},
}
FIELDS: dict[str, Any] = {
    "name": "topics",
    "dataset": "nowhere",
    "columns": ["text"],
    "labels": ["one", "two", "three"],
    "max_length": 48,
    "epochs": 1,
    "validation": {"validation": "validation"},
}
SINGLE = make_task(**FIELDS, metrics=["accuracy"])
SEVERAL = make_task(**FIELDS, type="multilabel", metrics=["f1_micro"])
INFERENCE = ["contradiction", "neutral", "entailment"]


def packed_texts(texts: Sequence[Sequence[int]]) -> Batch:
    """Return a batch of texts without labels, from the token ids of each; they are sorted by length."""
    lengths = np.array([len(tokens) for tokens in texts])
    starts = np.cumsum(lengths) - lengths
    return Batch(
        input_ids=torch.tensor([token for tokens in texts for token in tokens]),
        segments=torch.zeros(int(lengths.sum()), dtype=torch.long),
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        starts=torch.from_numpy(starts),
        index=torch.arange(len(texts)),
        groups=tuple(length_groups(lengths, starts, None)),
    )


def inference_model(folder: Path, tokenizer: Path, family: str = "bert", names: Sequence[str] = INFERENCE) -> Path:
    label2id = {name: number for number, name in enumerate(names)}
    settings = {"id2label": dict(enumerate(names)), "label2id": label2id} | (BERT if family == "bert" else BART)
    return save_classifier(folder, family, tokenizer, settings, seed=5)


def outputs_of(model: Any, folder: Path, texts: list[str], work: Path) -> torch.Tensor:
    work.mkdir()
    TokenSplit.write(work, Examples([texts], None), AutoTokenizer.from_pretrained(folder), 48)
    batch = TokenSplit(work).batch(range(len(texts)))
    with torch.inference_mode():
        logits = extract(model.eval(), batch, FeatureRequest(logits=True)).logits
    assert logits is not None
    return logits[batch.index.argsort()]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("family", "names"), [("bert", INFERENCE), ("bert", ["entailment", "not_entailment"]), ("bart", INFERENCE)]
)
def test_probabilities_are_those_of_the_pipeline(
    tmp_path: Path,
    tiny_bert_folder: Path,
    tiny_examples: dict[str, Examples],
    family: str,
    names: list[str],
    several: bool,
) -> None:
    folder, texts = (
        inference_model(tmp_path / "model", tiny_bert_folder, family, names),
        tiny_examples["validation"].texts[0],
    )
    head = (SEVERAL if several else SINGLE).head
    zero_shot = ZeroShot(template=TEMPLATE, classes=CLASSES)
    model: Any = build(ModelConfig(source=str(folder), head="keep", zero_shot=zero_shot), head)
    logits = outputs_of(model, folder, texts, tmp_path / "split")
    probabilities = logits.sigmoid() if several else logits.softmax(-1)
    reference = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    answers = reference(texts, candidate_labels=CLASSES, hypothesis_template=TEMPLATE, multi_label=several)
    scores = [dict(zip(answer["labels"], answer["scores"], strict=True)) for answer in answers]
    expected = torch.tensor([[row[name] for name in CLASSES] for row in scores])
    assert expected.std(0).min() > 1e-2
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", head)
    assert isinstance(again, ZeroShotClassifier)
    assert torch.equal(outputs_of(again, folder, texts, tmp_path / "again"), logits)


def test_a_suffix_follows_each_text() -> None:
    texts = [[5, 6], [7, 8, 9], [1, 2, 3, 4]]
    longer, expected = with_suffix(packed_texts(texts), [21, 22], 1), packed_texts([[*text, 21, 22] for text in texts])
    for name in ("input_ids", "positions", "starts", "index"):
        assert torch.equal(getattr(longer, name), getattr(expected, name)), name
    assert longer.segments.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    ((group,), (other,)) = longer.groups, expected.groups
    assert (group.sequences, group.tokens) == (other.sequences, other.tokens)
    assert torch.equal(group.gather[:, :6], other.gather)
    assert torch.equal(group.is_token.nonzero(), other.is_token.nonzero())


def overrides(model: Path, student: Path, *more: str) -> list[str]:
    values = ["teacher=zero_shot", f"teacher.source={model}", "method=rkd", "loss.eta=1", "optim.epochs=1"]
    return [*values, "task.columns=[sentence1]", f"student.init.source={student}", *more]


def test_a_student_learns_from_it_and_it_is_scored(compose: Compose, tmp_path: Path, tiny_bert_folder: Path) -> None:
    folder = inference_model(tmp_path / "model", tiny_bert_folder)
    run = compose(*overrides(folder, tiny_bert_folder))
    stage, pipeline_ = resolve(run.stages, "student", "fp32"), Pipeline(Store(run.store.dir), run.runtime)
    pipeline_.build(stage)
    assert stage.teacher is not None
    assert stage.teacher.shape.model_type == "zero-shot bert"
    metrics = json.loads((pipeline_.build(stage.teacher) / "metrics.json").read_text())["metrics"]
    assert 0 <= metrics["accuracy"] <= 1
    assert not (pipeline_.build(stage) / "model" / "zero_shot.json").exists()
    cached = np.load(pipeline_.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    rows = (Path(run.stages["student"].task.dataset) / "train.csv").read_text().splitlines()[1:4]  # type: ignore[union-attr]
    reference = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    for row, logits in zip(rows, cached, strict=False):
        answer = reference(row.split(",")[0], candidate_labels=["no", "yes"])
        scores = dict(zip(answer["labels"], answer["scores"], strict=True))
        powers = np.exp(logits - logits.max())
        np.testing.assert_allclose(powers / powers.sum(), [scores["no"], scores["yes"]], atol=1e-5)


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (["LABEL_0", "LABEL_1", "LABEL_2"], [], r"\[LABEL_0,LABEL_1,LABEL_2\] name no entailment"),
        (INFERENCE, ["task.columns=[sentence1,sentence2]"], "an example of .* has 2"),
        (INFERENCE, ["teacher.zero_shot.classes=[good]"], r"names 1 classes, the task .* has 2: \[no,yes\]"),
        (INFERENCE, ["task.max_length=500"], "reads at most 4.. tokens"),
        (INFERENCE, ["teacher.optim.epochs=1"], "a zero-shot bert cannot be trained"),
        (
            INFERENCE,
            ["method=alp", "loss.eta=0.5"],
            r"a teacher of type zero-shot bert gives logits only",
        ),
    ],
)
def test_what_does_not_suit_is_refused(
    compose: Compose, tmp_path: Path, tiny_bert_folder: Path, names: list[str], values: list[str], message: str
) -> None:
    folder = inference_model(tmp_path / "model", tiny_bert_folder, names=names)
    with pytest.raises(UserError, match=message):
        resolve(compose(*overrides(folder, tiny_bert_folder), *values).stages, "student", "fp32")


def test_classes_without_words_are_refused(tmp_path: Path, tiny_bert_folder: Path) -> None:
    model = ModelConfig(source=str(inference_model(tmp_path / "model", tiny_bert_folder)), zero_shot=ZeroShot())
    head: Head = make_task(**FIELDS | {"labels": ["0", "1"]}, metrics=["accuracy"]).head
    with pytest.raises(UserError, match=r"\[0,1\], say nothing about a text"):
        build(model, head)


@pytest.mark.parametrize(
    ("values", "message"), [({"template": "sports"}, "must have one {}"), ({"classes": ["a", "A"]}, "a class twice")]
)
def test_wrong_templates_and_classes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroShot(**values)
