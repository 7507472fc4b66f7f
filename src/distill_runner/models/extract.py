"""FeatureRequest -> Features: the features that methods read from a model, computed once and no further than requested.

Packed tokens have no padding except in the attention. Families that cannot run packed use ``padded``; image networks
run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from distill_runner.datasets.batches import Batch, DropoutMasks
from distill_runner.datasets.image_splits import ImageBatch
from distill_runner.models.attention import PackedAttention
from distill_runner.models.families import PACKED, PROJECTIONS, Family, Layer, Projection
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.models.vectors import SentenceEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SITES = 4
"""Dropout sites per layer: layer k (from 1) has the sites from k * ``SITES`` on. The embeddings have site 0, and the
head has the sites from ``_HEAD`` on."""
_HEAD = 1

Angles = tuple[Tensor, Tensor]


def extract(model: PreTrainedModel, batch: Batch, needs: FeatureRequest) -> Features:
    """Run ``model`` on ``batch`` as far as ``needs`` asks, without padding if its family allows."""
    if isinstance(batch, ImageBatch):
        return Features(logits=model(pixel_values=batch.pixel_values).logits)
    if model.config.model_type not in PACKED:
        from distill_runner.models.padded import extract_padded

        return extract_padded(model, batch, needs)
    family, own_batch = PACKED[model.config.model_type], batch
    if torch.is_autocast_enabled("cpu"):
        batch = batch.round_up()  # CPU kernels for low precision are compiled for each number of rows
    has_masks = model.training and batch.input_ids.is_cpu
    masks = DropoutMasks(batch.dropout_seed, batch) if has_masks and batch.dropout_seed is not None else None
    call = _PackedCall(model, family, family.layers(model.base_model), batch, own_batch, masks, needs)
    features = Features()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not needs.first_trained):
        h_TH = family.embed(model, batch, partial(_drop, masks, 0, None))
    h_TH = _run_layers(call, h_TH, features)
    if needs.logits and isinstance(model, SentenceEncoder):
        features.logits = model.head(call.example_states(h_TH))
    elif needs.logits:
        if call.reads_mean:
            input_RH = own_batch.means(h_TH[: own_batch.num_tokens])
        elif batch.head_tokens is not None:
            input_RH = h_TH.index_select(0, batch.head_tokens)
        else:
            input_RH = call.example_states(h_TH)
        features.logits = family.logits(model, input_RH, partial(_drop, masks, _HEAD, batch.head_tokens))
    if needs.next_sentence:
        pooled_BH = call.model.base_model.pooler(call.example_states(h_TH)[:, None])
        features.next_sentence = call.model.cls.seq_relationship(pooled_BH)
    return features


class Extraction(nn.Module):
    """``extract`` as a module, which ``torch.func.functional_call`` calls with other weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, needs: FeatureRequest) -> Features:
        return extract(self.model, batch, needs)


@dataclass(frozen=True)
class _PackedCall:
    """One call of a model of a packed family.

    Attributes:
        batch: tokens; on a CPU in low precision some meaningless tokens follow those of ``own_batch``.
        own_batch: the same without meaningless tokens.
        masks: dropout masks in training; None in evaluation, or to use torch's own generator.
    """

    model: Any
    family: Family
    layers: Sequence[Layer]
    batch: Batch
    own_batch: Batch
    masks: DropoutMasks | None
    needs: FeatureRequest

    @property
    def reads_mean(self) -> bool:
        """Whether the head reads the mean of each sequence."""
        has_classifier = self.needs.logits and self.batch.head_tokens is None and hasattr(self.model, "classifier")
        return has_classifier and self.family.may_read_mean and self.model.config.classifier_pooling == "mean"

    def example_states(self, h_TH: Tensor) -> Tensor:
        """Return the state (B, H) of each example: of its first token, or pooled in a model of vectors."""
        if len(h_TH) == self.batch.size:
            return h_TH
        if isinstance(self.model, SentenceEncoder):
            return self.model.pool(h_TH[: self.own_batch.num_tokens], self.own_batch)
        return h_TH.index_select(0, self.batch.starts)


def _run_layers(call: _PackedCall, h_TH: Tensor, features: Features) -> Tensor:
    """Run the layers that the request needs, and write what it reads of them into ``features``.

    Returns:
        The output of the last of these layers: (T, H), or (B, H) if only the first tokens of it are read.
    """
    batch, needs, layers, num_tokens = call.batch, call.needs, call.layers, call.own_batch.num_tokens
    backbone = call.model.base_model
    num_outputs = len(layers) if needs.logits or needs.next_sentence else max(needs.cls | needs.states, default=0)
    last = max([num_outputs, *(number for _, number in needs.projections)])
    rotary_types = {layer.rotary for layer in layers[:last] if layer.rotary}
    angles = {rotary: call.family.angles(backbone, h_TH, batch.positions, rotary) for rotary in rotary_types}
    heads = PackedAttention(batch, call.model.config.num_attention_heads, call.masks)
    has_gradients, reads_first_only = torch.is_grad_enabled(), batch.head_tokens is None and not call.reads_mean
    if isinstance(call.model, SentenceEncoder):
        reads_first_only = call.model.reads_first_only
    if 0 in needs.states:
        features.states[0] = h_TH[:num_tokens]
    for number, layer in enumerate(layers[:last], start=1):
        names = [name for name in PROJECTIONS if (name, number) in needs.projections]
        layer_angles = angles.get(layer.rotary or "")
        if number == last > num_outputs:  # only projections are requested of this layer, not its output
            x_TH = layer.attention_input(h_TH)
            values = {name: _project(layer, [name], x_TH, layer_angles) for name in names}
            features.projections |= {(name, number): value[:num_tokens] for name, value in values.items()}
            break
        # The last layer computes first tokens only, unless its states are requested or the head reads others.
        # So far without rotary positions, which turn the keys of all tokens.
        reads_all = number in needs.states or layer.rotary is not None or not reads_first_only
        starts = batch.starts if number == last and not reads_all else None
        apply = partial(_layer, layer, heads, number * SITES, starts, names, layer_angles)
        if layer.module.training and getattr(layer.module, "gradient_checkpointing", False):
            apply = partial(checkpoint, apply, use_reentrant=False)
        with torch.set_grad_enabled(has_gradients and number >= needs.first_trained):
            h_TH, projections = apply(h_TH)
            if number == len(layers):
                h_TH = call.family.final_norm(backbone, h_TH)
        features.projections |= {(name, number): projections[name][:num_tokens] for name in names}
        if number in needs.states:
            features.states[number] = h_TH[:num_tokens]
        if number in needs.cls:
            features.cls[number] = call.example_states(h_TH)
    return h_TH


def _project(layer: Layer, names: Sequence[Projection], h_RH: Tensor, angles: Angles | None) -> Tensor:
    """Return the projections ``names``, concatenated to (R, len(names) * H), from one matrix product.

    Queries and keys with rotary positions are already rotated by ``angles``.
    """
    output = functional.linear(h_RH, *layer.weights(names))
    num_rotated = len([name for name in names if name != "value"])
    if angles is None or not num_rotated:
        return output
    width = output.shape[1] // len(names)
    queries_keys, values = output.split([num_rotated * width, output.shape[1] - num_rotated * width], -1)
    return torch.cat([_rotate(queries_keys, *angles), values], -1)


def _rotate(x_RH: Tensor, cos_Rd: Tensor, sin_Rd: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, Eq. 34), in float32 at least."""
    x_RNd = x_RH.unflatten(1, (-1, cos_Rd.shape[1])).to(torch.promote_types(x_RH.dtype, torch.float32))
    first, second = x_RNd.chunk(2, -1)
    rotated_RNd = x_RNd * cos_Rd[:, None] + torch.cat((-second, first), -1) * sin_Rd[:, None]
    return rotated_RNd.to(x_RH.dtype).flatten(1)


def _layer(
    layer: Layer,
    heads: PackedAttention,
    site: int,
    starts: Tensor | None,
    names: Sequence[Projection],
    angles: Angles | None,
    h_TH: Tensor,
) -> tuple[Tensor, Mapping[Projection, Tensor]]:
    """Run one layer over all packed tokens, or over the first tokens at ``starts``; return its output and projections.

    The projections include those of ``names``. The layer's dropouts use the sites from ``site`` on.
    """
    x_TH = layer.attention_input(h_TH)
    p = layer.attention_dropout if layer.module.training else 0.0
    if starts is None:
        qkv = _project(layer, PROJECTIONS, x_TH, angles)
        projections = dict(zip(PROJECTIONS, qkv.chunk(3, -1), strict=True))
        h_QH, context_QH = h_TH, heads.attend(qkv, p, site, layer.window)
    else:
        h_QH = h_TH.index_select(0, starts)
        q_BH = functional.linear(h_QH, *layer.weights(["query"]))
        projections = {name: _project(layer, [name], x_TH, angles) for name in names}
        context_QH = heads.attend_first(x_TH, q_BH, layer.weights(["key"]), layer.weights(["value"]), p, site)
    return layer.finish(h_QH, context_QH, partial(_drop, heads.dropout, site, None)), projections


def _drop(
    masks: DropoutMasks | None, site: int, rows_R: Tensor | None, dropout: Any, x_RH: Tensor, number: int
) -> Tensor:
    """A ``Drop`` by its last three arguments."""
    if masks is None:
        return dropout(x_RH)
    return masks.drop_features(x_RH, getattr(dropout, "p", 0.0), site + number, rows_R)
