"""Read features through a model's own ``forward`` on padded input, for families that cannot run packed."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distill_runner.common.errors import UserError, first_line, root_cause
from distill_runner.datasets.batches import Batch, packed_texts
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
        recording = hooked_projections(model.base_model, HOOKED[model.config.model_type], tape)
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
    """Return the logits of a decoder or an encoder-decoder, for each text as for that text without padding.

    The padding is on the right, whatever the tokenizer prefers, so that positions count from the first token.
    """
    input_ids, segments, mask = batch.to_padded()
    inputs: dict[str, Any] = {"attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = segments
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with _padding_token(model.config.get_text_config(), batch) as padding:
        try:
            logits = _logits(model(input_ids=input_ids.masked_fill(mask == 0, padding), **inputs))
        except ValueError as error:  # such as T5's, for a text that holds its mark of the end
            problem = f"the forward pass of a {model.config.model_type} refuses texts of the task: {first_line(error)}"
            raise UserError("teacher", None, problem, "Remove such texts, or take another teacher.") from error
    return logits if batch.head_tokens is None else batch.from_padded(logits)[batch.head_tokens]


def check_padding(model: PreTrainedModel, source: str) -> None:
    """Check that a decoder or an encoder-decoder gives the same logits for a text with and without padding.

    Args:
        source: name of the model, for the message.
    Raises:
        UserError: it does not, as XLNet, which pads on the left; or its forward pass fails.
    """
    text = model.config.get_text_config()
    pad, begin, end = (getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    words = [number for number in range(min(text.vocab_size, 100)) if number not in (pad, begin, end)]
    end = [end] if isinstance(end, int) else []
    texts = [words[:2] + end, words[-9:] + end]
    training = model.training
    try:
        with torch.inference_mode():
            model.eval()
            padded = _classifier_logits(model, packed_texts(texts))
            single = torch.cat([_classifier_logits(model, packed_texts([tokens])) for tokens in texts])
            model.train(training)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # each family has needs of its own
        problem = f"the forward pass of a {model.config.model_type} fails ({root_cause(error)})"
        raise UserError(
            ".model.source", source, problem, "Correct its config.json, or take another teacher."
        ) from error
    if not torch.allclose(padded, single, rtol=1e-3, atol=1e-3 * float(single.abs().max())):
        problem = f"the logits of a {model.config.model_type} for a text change with padding"
        raise UserError(".model.source", source, problem, "Take a teacher of another family.")


@contextmanager
def _padding_token(config: Any, batch: Batch) -> Iterator[int]:
    """Yield the id of the padding, which a model must not take for the last token of a text.

    Models of this kind read their last token that is not ``config.pad_token_id``. Without such an id they read the last
    token of a single text, and refuse several: here the id is one with which no text of the batch ends.
    """
    if getattr(config, "pad_token_id", None) is not None:
        yield config.pad_token_id
        return
    last_B = batch.input_ids[batch.starts + batch.sequence_lengths - 1]
    candidates = torch.arange(batch.size + 1, device=last_B.device)  # one of them is no last token
    config.pad_token_id = int(candidates[~torch.isin(candidates, last_B)][0])
    try:
        yield config.pad_token_id
    finally:
        config.pad_token_id = None


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
