"""Read features through a model's own ``forward`` on padded input, for families that cannot run packed."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distill_runner.common.errors import UserError, first_line
from distill_runner.datasets.batches import Batch
from distill_runner.models.families import PROJECTIONS
from distill_runner.models.features import FeatureRequest, Features, is_other_classifier
from distill_runner.models.hooked import HOOKED, hooked_projections
from distill_runner.models.vectors import SentenceEncoder

RECORDING = "distill_runner_recording"


def extract_padded(model: PreTrainedModel | SentenceEncoder, batch: Batch, needs: FeatureRequest) -> Features:
    """Run ``model`` on the padded ``batch``; every layer is computed."""
    if not isinstance(model, SentenceEncoder) and is_other_classifier(model.config):
        return Features(_classifier_logits(model, batch))
    input_ids, segments, mask = batch.to_padded()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments
    tape: list[tuple[Tensor, ...]] = []
    recording: AbstractContextManager[None] = nullcontext()
    if needs.projections and model.config.model_type in HOOKED:
        recording = hooked_projections(model.base_model, tape)
    elif needs.projections:
        model.set_attn_implementation(RECORDING)
        inputs["tape"] = tape
    network = model.base_model if isinstance(model, SentenceEncoder) else model
    with recording:
        output: Any = network(**inputs, output_hidden_states=bool(needs.cls or needs.states))
    if needs.projections and not tape:
        problem = f"models of type {model.config.model_type} do not expose their queries, keys and values"
        raise UserError("method", None, problem, "Take a model of another family, or a method without attention.")

    def example_states(states_BLH: Tensor) -> Tensor:
        if isinstance(model, SentenceEncoder):
            return model.pool(batch.from_padded(states_BLH), batch)
        return states_BLH[:, 0]

    logits = None
    if needs.logits and isinstance(model, SentenceEncoder):
        logits = model.head(example_states(output.last_hidden_state))
    elif needs.logits:
        logits = _logits(output)
        logits = logits if batch.head_tokens is None else batch.from_padded(logits)[batch.head_tokens]
    return Features(
        logits,
        {layer: example_states(output.hidden_states[layer]) for layer in needs.cls},
        {
            (name, layer): batch.from_padded(_heads_side_by_side(tape[layer - 1][PROJECTIONS.index(name)]))
            for name, layer in needs.projections
        },
        {layer: batch.from_padded(output.hidden_states[layer]) for layer in needs.states},
    )


def _classifier_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the logits of a decoder or an encoder-decoder, for each text as for that text alone.

    Texts of equal length run together, without padding, for which each of these families has rules of its own. Without
    an id of the padding they refuse several texts.
    """
    lengths, counts = torch.unique_consecutive(batch.sequence_lengths, return_counts=True)
    sizes = (lengths * counts).tolist()
    has_padding = getattr(model.config.get_text_config(), "pad_token_id", None) is not None
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits = []
    for ids_T, segments_T, length in zip(
        batch.input_ids.split(sizes), batch.segments.split(sizes), lengths.tolist(), strict=True
    ):
        count = len(ids_T) // length if has_padding else 1
        for ids, segments in zip(ids_T.split(count * length), segments_T.split(count * length), strict=True):
            inputs: dict[str, Any] = {"input_ids": ids.view(count, length)}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if getattr(model.config, "type_vocab_size", 0) > 1:
                inputs["token_type_ids"] = segments.view(count, length)
            try:
                logits.append(_logits(model(**inputs, **options)))
            except ValueError as error:  # such as T5's, for a text that holds its mark of the end
                problem = f"the forward pass of a {model.config.model_type} refuses texts of the task"
                problem += f": {first_line(error)}"
                raise UserError("teacher", None, problem, "Remove such texts, or take another teacher.") from error
    if batch.head_tokens is None:
        return torch.cat(logits)
    return torch.cat([part.flatten(0, 1) for part in logits])[batch.head_tokens]


def _heads_side_by_side(projection: Tensor) -> Tensor:
    """Return a projection (B, L, H), which the attention interface records as (B, heads, L, d)."""
    return projection.transpose(1, 2).flatten(2) if projection.ndim == 4 else projection


def _logits(output: Any) -> Tensor:
    """Return the logits (B, C), or (B, L, C) of a token-wise head; a head for spans has C = 2, start and end."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run ``sdpa`` and append its inputs, each (B, heads, L, d), to the list ``tape`` given to the model, if any."""
    if (tape := options.pop("tape", None)) is not None:
        tape.append((query, key, value))
    context, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return context, None


AttentionInterface.register(RECORDING, _recording_attention)
AttentionMaskInterface.register(RECORDING, sdpa_mask)  # without this mask, tokens would silently attend to padding
