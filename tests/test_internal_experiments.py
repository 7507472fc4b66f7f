"""The experiments of internal representations: what they have in common, and what each pair of them compares."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.base import Method, Progress
from distill_runner.methods.config import MethodConfig
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.features import EncoderShape

Compose = Callable[..., RunConfig]
NUM_EXAMPLES, NUM_EPOCHS = 6, 50
WITH_KL = ("3_0", "3_2", "3_4_together", "3_4", "3_5", "3_6")


def bert(num_layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 100, "num_hidden_layers": num_layers, "max_position_embeddings": 80}
    return BertForSequenceClassification(BertConfig(**sizes, initializer_range=0.5)).double().eval()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A student of 3 layers and a teacher of 6, so that student layer j belongs to teacher layer 2 j."""
    return bert(3, seed=1), bert(6, seed=2)


@pytest.fixture(scope="module")
def batch(tokens: TokenSplit) -> Batch:
    return replace(tokens.batch(range(NUM_EXAMPLES)), labels=torch.arange(NUM_EXAMPLES) % 2)


@torch.no_grad()
def reference(student: Any, teacher: Any, batch: Batch) -> dict[str, float]:
    """Equations 1 to 3 and Algorithm 1, example by example, from the attentions and states of transformers itself."""
    sums = {"soft": 0.0, "kl": 0.0, "cos": 0.0}
    bounds = [*batch.starts.tolist(), len(batch.input_ids)]
    for start, stop in pairwise(bounds):
        ids, segments = batch.input_ids[None, start:stop], batch.segments[None, start:stop]
        outputs = []
        for model in (student, teacher):
            model.set_attn_implementation("eager")
            outputs.append(model(ids, token_type_ids=segments, output_attentions=True, output_hidden_states=True))
            model.set_attn_implementation("sdpa")
        mine, theirs = outputs
        p, q = (side.logits.softmax(-1) for side in (theirs, mine))
        sums["soft"] += (p * (p / q).log()).sum().item()
        for j in (1, 2, 3):
            p, q = theirs.attentions[2 * j - 1][0], mine.attentions[j - 1][0]
            sums["kl"] += (p * (p / q).log()).sum(-1).mean().item()
            x, y = theirs.hidden_states[2 * j][0, 0], mine.hidden_states[j][0, 0]
            sums["cos"] += 1 - (x @ y / (x.norm() * y.norm())).item()
    return {name: total / NUM_EXAMPLES for name, total in sums.items()}


@torch.no_grad()
def losses(method: MethodConfig, models: tuple[Any, Any], batch: Batch, epoch: int) -> dict[str, float]:
    """The weighted terms of a method in an epoch of 50, of which a schedule takes 40 for its layers."""
    shapes = [EncoderShape.from_config(model.config) for model in models]
    made: Method = method.build(shapes[0], shapes[1], Classes())
    for number in range(epoch + 1):
        made.begin_epoch(Progress(number, number, NUM_EPOCHS, NUM_EPOCHS))
    student, teacher = (
        extract(model, batch, needs)
        for model, needs in zip(models, (made.student_needs, made.teacher_needs), strict=True)
    )
    means: dict[str, Tensor] = made(student, teacher, batch, Progress(epoch, epoch, NUM_EPOCHS, NUM_EPOCHS))
    return {name: loss.item() for name, loss in made.weighted_losses(means).items()}


def student_method(compose: Compose, *overrides: str) -> MethodConfig:
    return compose(*overrides, "student.num_layers=3").stages["student"].method


def test_the_method_is_experiment_3_2(compose: Compose, models: tuple[Any, Any], batch: Batch) -> None:
    """Whoever takes ``method=internal`` for the paper's Exp3.2 would publish another loss."""
    method, experiment = (student_method(compose, name) for name in ("method=internal", "experiment=internal/3_2"))
    expected = reference(*models, batch)
    assert losses(method, models, batch, 0) == pytest.approx(expected, rel=1e-9)
    assert losses(experiment, models, batch, 0) == pytest.approx(expected, rel=1e-9)
    assert min(expected.values()) > 0.1


@pytest.mark.parametrize("name", WITH_KL)
def test_every_experiment_adds_the_losses_of_layers(
    name: str, compose: Compose, models: tuple[Any, Any], batch: Batch
) -> None:
    """Table 1 compares schedules; with a mean in some rows and a sum in others it would compare weights too."""
    last_of_layers = 39  # all layers are supervised, with a schedule and without one
    found = losses(student_method(compose, f"experiment=internal/{name}"), models, batch, last_of_layers)
    expected = reference(*models, batch)
    assert "kl" in found
    for term in found.keys() & expected.keys():
        assert found[term] == pytest.approx(expected[term], rel=1e-9), term
