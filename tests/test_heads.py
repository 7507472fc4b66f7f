"""Heads that are kept: of every family, equal to the outputs of the source, in the order of the task."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.build import build, output_layer
from distill_runner.models.config import ModelConfig
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from helpers.classifiers import SCORES, TASK
from helpers.families import FAMILIES, make

ORDERS = {"own": ["no", "perhaps", "yes"], "permuted": ["Yes", "NO", "perhaps"]}
PLACES = {"own": [0, 1, 2], "permuted": [1, 2, 0]}


def source(folder: Path, family: str, **options: Any) -> Any:
    """A fine-tuned model of the family, saved in the folder; its biases are drawn, so that their order shows."""
    model: Any = make(family, **options)
    nn.init.normal_(output_layer(model).bias)
    model.save_pretrained(folder)
    return model


def outputs(model: Any, tokens: TokenSplit) -> Tensor:
    """Through the model's own forward, each of eight examples by itself."""
    batch = tokens.batch(range(8))
    pieces = batch.input_ids.tensor_split(batch.starts[1:])
    with torch.inference_mode():
        return torch.cat([model(input_ids=piece[None]).logits for piece in pieces])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_head_gives_the_outputs_of_its_source(
    tmp_path: Path, tokens: TokenSplit, family: str, order: str
) -> None:
    given = source(tmp_path, family, id2label=dict(enumerate(ORDERS[order])))
    kept = build(ModelConfig(source=str(tmp_path), head="keep"), TASK.head).eval()
    expected = outputs(given, tokens)
    assert expected.std(0).min() > 1e-4
    torch.testing.assert_close(outputs(kept, tokens), expected[:, PLACES[order]], rtol=1e-5, atol=1e-6)
    assert list(kept.config.id2label.values()) == TASK.labels
    _, other = given.state_dict(), kept.state_dict()
    changed = {name for name, tensor in given.state_dict().items() if not torch.equal(tensor, other[name])}
    prefix = next(name for name, layer in given.named_modules() if layer is output_layer(given))
    assert changed == (set() if order == "own" else {f"{prefix}.weight", f"{prefix}.bias"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_head_of_scores_gives_the_outputs_of_its_source(tmp_path: Path, tokens: TokenSplit, family: str) -> None:
    given = source(tmp_path, family, num_labels=1)
    kept = build(ModelConfig(source=str(tmp_path), head="keep"), SCORES.head).eval()
    other = kept.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in given.state_dict().items())
    torch.testing.assert_close(outputs(kept, tokens), outputs(given, tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_of_a_kept_head_is_what_it_gives(tmp_path: Path, tokens: TokenSplit, family: str) -> None:
    """The same by the way that training and evaluation take."""
    given = source(tmp_path, family)
    batch = tokens.batch(range(8))
    batch.segments.zero_()
    with torch.inference_mode():
        read = extract(given, batch, FeatureRequest(logits=True)).logits
    assert read is not None
    torch.testing.assert_close(read, outputs(given, tokens), rtol=1e-4, atol=1e-5)
