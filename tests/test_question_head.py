"""The span head over all tokens of a packed batch against the model's own padded forward, and its losses."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForQuestionAnswering

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.padded import extract_padded
from distill_runner.tasks.questions import losses
from helpers.families import PACKED_FAMILIES, config_of


@pytest.mark.parametrize("family", [*sorted({*PACKED_FAMILIES} - {"modernbert"}), "mpnet"])
def test_packed_is_padded_in_float64(family: str, tokens: TokenSplit) -> None:
    """The logits, the gold loss and all gradients, against ``AutoModelForQuestionAnswering``'s own loss."""
    torch.manual_seed(1)
    model = AutoModelForQuestionAnswering.from_config(config_of(family, num_labels=2)).to(torch.float64).eval()
    batch = tokens.batch(range(12))
    labels = torch.stack([(batch.sequence_lengths - 1) // 3, (batch.sequence_lengths - 1) // 2], dim=1)
    batch = replace(batch, head_tokens=torch.arange(len(batch.input_ids)), labels=labels)
    needs = FeatureRequest(logits=True, cls=frozenset({1, 3}))
    ours = extract(model, batch, needs)
    theirs = extract_padded(model, batch, needs)
    torch.testing.assert_close(ours.logits_OC, theirs.logits_OC, rtol=1e-10, atol=1e-10)
    for layer in needs.cls:
        torch.testing.assert_close(ours.cls[layer], theirs.cls[layer], rtol=1e-10, atol=1e-10)
    loss = losses.Spans().label_loss(ours.logits_OC, batch)
    packed = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    input_ids, segments, mask = batch.to_padded()
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    inputs |= {"token_type_ids": segments} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    output = model(**inputs)
    ends = [(output.start_logits, labels[:, 0]), (output.end_logits, labels[:, 1])]
    reference = torch.stack([cross_entropy(z.masked_fill(mask == 0, -torch.inf), y) for z, y in ends]).mean()
    padded = torch.autograd.grad(reference, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(loss, reference, rtol=1e-10, atol=1e-10)
    for one, other in zip(packed, padded, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
