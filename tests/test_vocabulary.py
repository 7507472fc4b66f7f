"""Training the rows of an embedding that occur against training all of them."""

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from distill_runner.datasets.splits import TokenSplit
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.vocabulary import UsedRows, full_vocabulary, train_used_rows

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 150,
    "max_position_embeddings": 80, "initializer_range": 0.3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
RATES, DECAY = [1e-2, 3e-2, 2e-2, 1e-2], 0.1


def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES)).double()


def trained(model: Any, tokens: TokenSplit) -> list[float]:
    """The losses of a few AdamW steps with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    losses = []
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        logits = extract(model, tokens.batch(range(8 * step, 8 * step + 8)), FeatureRequest(logits=True)).logits_OC
        loss = logits.square().sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("with_padding", [True, False])
def test_rows_that_occur_alone_train_to_the_same_model(tokens: TokenSplit, with_padding: bool) -> None:
    reference, model = bert(), bert()
    expected = trained(reference, tokens)
    used = torch.tensor(sorted({0} | set(tokens.ids.tolist())) if with_padding else sorted(set(tokens.ids.tolist())))
    assert len(used) < 150
    train_used_rows(model, used)
    assert trained(model, tokens) == pytest.approx(expected, rel=1e-12)
    decay = float(torch.tensor([1 - rate * DECAY for rate in RATES], dtype=torch.float64).prod())
    with full_vocabulary(model, decay) as complete:
        found = complete.state_dict()
        assert found.keys() == reference.state_dict().keys()
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)
    assert isinstance(model.get_input_embeddings(), UsedRows)


def test_a_model_that_reads_its_embedding_in_its_head_stays_whole() -> None:
    model = BertForMaskedLM(BertConfig(**SIZES))
    train_used_rows(model, torch.arange(10))
    assert model.get_input_embeddings().weight.shape == (150, 32)


def test_nothing_changes_where_all_words_occur() -> None:
    model = bert()
    train_used_rows(model, torch.arange(150))
    assert not isinstance(model.get_input_embeddings(), UsedRows)


def test_a_word_that_was_left_out_has_no_row() -> None:
    model = bert()
    train_used_rows(model, torch.tensor([0, 3, 9]))
    with pytest.raises(IndexError):
        model.get_input_embeddings()(torch.tensor([4]))
