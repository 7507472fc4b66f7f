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

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import Batch
from distill_runner.models.families import HOOKED, PROJECTIONS
from distill_runner.models.features import FeatureRequest, Features, is_other_classifier, reads_segments
from distill_runner.models.vectors import SentenceEncoder

RECORDING = "distill_runner_recording"


def reads_padding(model: PreTrainedModel | SentenceEncoder) -> bool:
    """Return whether logits depend on padding: of decoders by rules of their own, or through a convolution or FFT."""
    mixes_tokens = model.config.model_type in ("convbert", "fnet")
    return not isinstance(model, SentenceEncoder) and (mixes_tokens or is_other_classifier(model.config))


def extract_padded(model: PreTrainedModel | SentenceEncoder, batch: Batch, needs: FeatureRequest) -> Features:
    """Run ``model`` on the padded ``batch``; every layer is computed."""
    if needs == FeatureRequest(logits=True) and reads_padding(model):
        return Features(_classifier_logits(model, batch))
    input_ids, segments, mask = batch.to_padded()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask}
    if reads_segments(model.config):
        inputs["token_type_ids"] = segments
    tape: list[tuple[Tensor, ...]] = []
    recording: AbstractContextManager[None] = nullcontext()
    if needs.projections and model.config.model_type in HOOKED:
        recording = _hooked_projections(model.base_model, tape)
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
            (name, layer): batch.from_padded(part.transpose(1, 2).flatten(2) if part.ndim == 4 else part)
            for name, layer in needs.projections
            for part in [tape[layer - 1][PROJECTIONS.index(name)]]  # the attention interface records (B, heads, L, d)
        },
        {layer: batch.from_padded(output.hidden_states[layer]) for layer in needs.states},
    )


@contextmanager
def _hooked_projections(backbone: Any, tape: list[tuple[Tensor, ...]]) -> Iterator[None]:
    """Append queries, keys and values of each layer, (B, L, H), to ``tape`` at the end of the context, by hooks.

    A hook reads the output of the linear layer that makes them, of a forward pass within the context. They are the
    projections of the tokens alone: what is added to the scores for relative positions is not part of them.

    DeBERTa applies its layers to embeddings of relative positions as well, later in the pass; only the first call of
    each counts.
    """
    attention, names = HOOKED[backbone.config.model_type]
    modules = [layer.get_submodule(attention) for layer in backbone.encoder.layer]
    outputs: dict[Any, Tensor] = {}

    def keep(linear: Any, _inputs: Any, output: Tensor) -> None:
        outputs.setdefault(linear, output)

    hooks = [getattr(module, name).register_forward_hook(keep) for module in modules for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for module in modules:
        projections = tuple(outputs[getattr(module, name)] for name in names)
        if len(names) == 1:  # DeBERTa's one product has query, key and value of each head side by side, without biases
            parts = projections[0].unflatten(2, (module.num_attention_heads, 3, -1)).unbind(3)
            query, key, value = (part.flatten(2) for part in parts)
            projections = query + module.q_bias, key, value + module.v_bias
        tape.append(projections)


def _classifier_logits(model: Any, batch: Batch) -> Tensor:
    """Return the logits of a model that reads padding, for each text as for that text alone.

    Texts of equal length run together, without padding, for which each of these families has rules of its own.
    """
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(ids_nL: Tensor, segments_nL: Tensor) -> Tensor:
        segments = {"token_type_ids": segments_nL} if reads_segments(model.config) else {}
        return _logits(model(input_ids=ids_nL, attention_mask=torch.ones_like(ids_nL), **segments, **options))

    lengths, counts = torch.unique_consecutive(batch.sequence_lengths, return_counts=True)
    sizes, logits = (lengths * counts).tolist(), list[Tensor]()
    sides = zip(batch.input_ids.split(sizes), batch.segments.split(sizes), lengths.tolist(), strict=True)
    for ids_T, segments_T, length in sides:
        ids_nL, segments_nL = ids_T.view(-1, length), segments_T.view(-1, length)
        try:
            logits.append(run(ids_nL, segments_nL))
        except ValueError:  # the model has no id of the padding, or T5's texts have unequal numbers of marks of the end
            logits += [run(*row) for row in zip(ids_nL.split(1), segments_nL.split(1), strict=True)]
    if batch.head_tokens is None:
        return torch.cat(logits)
    return torch.cat([part.flatten(0, 1) for part in logits])[batch.head_tokens]


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
