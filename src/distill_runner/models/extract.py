"""FeatureRequest -> Features: the features that methods read from a model, computed once and no further than requested.

Packed tokens have no padding except in the attention. Families that cannot run packed use ``padded``; image networks
use ``images``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from distill_runner.datasets.batches import Batch
from distill_runner.datasets.images.pixels import PixelBatch
from distill_runner.datasets.noise import DropoutMasks
from distill_runner.models.attention import PackedAttention
from distill_runner.models.bert import DistilBert, Drop, Electra, Family, Layer, Roberta
from distill_runner.models.features import PROJECTIONS, FeatureRequest, Features, Projection
from distill_runner.models.images import extract_pixels
from distill_runner.models.rotary import ModernBert, NomicBert

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED: dict[str, Family] = {
    "bert": Family(),
    "electra": Electra(),
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "distilbert": DistilBert(),
    "modernbert": ModernBert(),
    "nomic_bert": NomicBert(),
}
"""Packed families by model type. Other types run padded, through their own ``forward``."""

SITES = 4
"""Dropout sites per layer: layer k (from 1) has the sites from k * ``SITES`` on. The embeddings have site 0, and the
head has the sites from ``HEAD`` on."""
HEAD = 1

Angles = tuple[Tensor, Tensor]


def extract(model: PreTrainedModel, batch: Batch, needs: FeatureRequest) -> Features:
    """Run ``model`` on ``batch`` as far as ``needs`` asks, without padding if its family allows."""
    if isinstance(batch, PixelBatch):
        return extract_pixels(model, batch, needs)
    if model.config.model_type in PACKED:
        return _extract_packed(model, batch, needs)
    from distill_runner.models.padded import extract_padded

    return extract_padded(model, batch, needs)


def _extract_packed(model: PreTrainedModel, batch: Batch, needs: FeatureRequest) -> Features:
    """Run a model of a packed family on ``batch`` as far as ``needs`` asks."""
    family, backbone = PACKED[model.config.model_type], _backbone(model)
    layers = family.layers(backbone)
    num_tokens, learning = len(batch.input_ids), torch.is_grad_enabled()
    if torch.is_autocast_enabled("cpu"):
        batch = batch.rounded()  # CPU kernels for low precision are compiled for each number of rows
    noise = DropoutMasks.of(batch) if model.training else None
    reads_mean = needs.logits and batch.rows is None and family.reads_mean(model)
    has_head = needs.logits or needs.next_sentence
    whole = len(layers) if has_head else max(needs.cls | needs.states, default=0)
    deepest = max([whole, *(number for _, number in needs.projections)])
    with torch.set_grad_enabled(learning and not needs.first_trained):
        h_TH, features = family.embed(model, batch, _drop_at(noise, 0)), Features()
    kinds = {layer.rotary for layer in layers[:deepest] if layer.rotary}
    angles = {kind: family.angles(backbone, h_TH, batch.positions, kind) for kind in kinds}
    heads = PackedAttention(batch, model.config.num_attention_heads, noise)
    if 0 in needs.states:
        features.states[0] = h_TH[:num_tokens]
    for number, layer in enumerate(layers[:deepest], start=1):
        wanted = [name for name in PROJECTIONS if (name, number) in needs.projections]
        turned = angles.get(layer.rotary or "")
        if number == deepest > whole:  # only projections are requested of this layer, not its output
            read: Mapping[Projection, Tensor]
            read = {name: _project(layer, [name], layer.attended(h_TH), turned) for name in wanted}
            features.projections |= {(name, number): read[name][:num_tokens] for name in wanted}
            break
        # The deepest layer computes first tokens only, unless its states are requested or the head reads other tokens.
        only_cls = number == deepest and batch.rows is None and number not in needs.states and not reads_mean
        one = _compiled_layer() if layer.compiled else _layer
        run = partial(one, layer, heads, number * SITES, batch.starts if only_cls else None, wanted, turned)
        with torch.set_grad_enabled(learning and number >= needs.first_trained):
            h_TH, read = checkpoint(run, h_TH, use_reentrant=False) if layer.computed_twice else run(h_TH)
            if number == len(layers):
                h_TH = family.normed(backbone, h_TH)
        features.projections |= {(name, number): read[name][:num_tokens] for name in wanted}
        if number in needs.states:
            features.states[number] = h_TH[:num_tokens]
        if number in needs.cls:
            features.cls[number] = h_TH if only_cls else h_TH.index_select(0, batch.starts)
    if has_head:
        cls_BH = h_TH if len(h_TH) == batch.size else h_TH.index_select(0, batch.starts)
        read_RH = cls_BH if batch.rows is None else h_TH.index_select(0, batch.rows)
        if needs.logits:
            read_RH = _means(h_TH[:num_tokens], batch) if reads_mean else read_RH
            features.logits = family.logits(model, read_RH, _drop_at(noise, HEAD))
        if needs.next_sentence:
            head: Any = model.cls
            features.next_sentence = head.seq_relationship(backbone.pooler(cls_BH[:, None]))
    return features


def _backbone(model: Any) -> Any:
    return model.base_model


def _means(h_TH: Tensor, batch: Batch) -> Tensor:
    """Return the mean (B, H) of each sequence."""
    lengths = torch.diff(batch.starts, append=batch.starts.new_full((1,), len(h_TH)))
    of_token = torch.arange(batch.size, device=h_TH.device).repeat_interleave(lengths, output_size=len(h_TH))
    return h_TH.new_zeros(batch.size, h_TH.shape[1]).index_add(0, of_token, h_TH) / lengths[:, None]


def _project(layer: Layer, names: Sequence[Projection], h_RH: Tensor, angles: Angles | None) -> Tensor:
    """Return the projections ``names`` side by side, (R, len(names) * H), from one matrix product.

    Queries and keys with rotary positions are already rotated by ``angles``.
    """
    projected = linear(h_RH, *layer.weights(names))
    num_turned = len([name for name in names if name != "value"])
    if angles is None or not num_turned:
        return projected
    width = projected.shape[1] // len(names)
    turned, values = projected.split([num_turned * width, projected.shape[1] - num_turned * width], -1)
    return torch.cat([_turn(turned, *angles), values], -1)


def _turn(x_RH: Tensor, cos_Rd: Tensor, sin_Rd: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, Eq. 34), in float32 at least."""
    size = cos_Rd.shape[1]
    x_RNd = x_RH.unflatten(1, (-1, size)).to(torch.promote_types(x_RH.dtype, torch.float32))
    one, other = x_RNd.chunk(2, -1)
    turned = x_RNd * cos_Rd[:, None] + torch.cat((-other, one), -1) * sin_Rd[:, None]
    return turned.to(x_RH.dtype).flatten(1)


def _layer(
    layer: Layer,
    heads: PackedAttention,
    site: int,
    starts: Tensor | None,
    wanted: Sequence[Projection],
    angles: Angles | None,
    h_TH: Tensor,
) -> tuple[Tensor, Mapping[Projection, Tensor]]:
    """Run one layer over all packed tokens, or over the first tokens at ``starts``; return its output and projections.

    The projections include those in ``wanted``. The layer's dropouts use the sites from ``site`` on.
    """
    x_TH = layer.attended(h_TH)
    p = layer.attention_dropout if layer.module.training else 0.0
    if starts is None:
        projected = _project(layer, PROJECTIONS, x_TH, angles)
        read = dict(zip(PROJECTIONS, projected.chunk(3, -1), strict=True))
        h_QH, context_QH = h_TH, heads.attend(projected, p, site, layer.window)
    else:
        h_QH = h_TH.index_select(0, starts)
        x_QH = h_QH if x_TH is h_TH else x_TH.index_select(0, starts)
        q_BH = linear(x_QH, *layer.weights(["query"]))  # no rotation, since a first token has position 0
        read = {name: _project(layer, [name], x_TH, angles) for name in wanted}
        if angles is None:
            context_QH = heads.attend_first(x_TH, q_BH, layer.weights(["key"]), layer.weights(["value"]), p, site)
        else:
            sides = _project(layer, ["key", "value"], x_TH, angles)
            context_QH = heads.attend_first_projected(sides, q_BH, p, site, layer.window)
    return layer.finish(h_QH, context_QH, _drop_at(heads.noise, site)), read


@cache
def _compiled_layer() -> Callable[..., Any]:
    """Return ``_layer`` with a compiled graph for each kind of layer, which all layers of this kind share."""
    torch._dynamo.config.recompile_limit = 64  # teachers and students of other widths, training and evaluation
    return torch.compile(_layer, dynamic=True)


def _drop_at(noise: DropoutMasks | None, site: int) -> Drop:
    def drop(dropout: Any, x_RH: Tensor, place: int) -> Tensor:
        if noise is None:
            dropped: Tensor = dropout(x_RH)
            return dropped
        return noise.rows(x_RH, getattr(dropout, "p", 0.0), site + place)

    return drop
