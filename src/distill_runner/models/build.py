"""Build the models of a run: from a source or with new weights, with fewer layers if asked, with a new or kept head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoModel

from distill_runner.common.errors import UserError, override, root_cause
from distill_runner.models.config import Head, Init, ModelConfig, layers_to_copy
from distill_runner.models.features import EncoderShape
from distill_runner.models.images import reads_images
from distill_runner.models.sources import ModelSource, read_config, resolve_source, trusts_code
from distill_runner.models.static import StaticModel, fill_table
from distill_runner.models.vectors import (
    SentenceEncoder,
    SentenceFolder,
    VectorModules,
    new_content,
    source_folder,
    vector_modules,
)
from distill_runner.models.weights import auto_name, require_all

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


OUTPUT_LAYERS = (
    *("classifier.out_proj", "classifier.1", "classifier", "classifier.linear_out"),
    *("score", "score.out_proj", "classification_head.out_proj", "logits_proj", "sequence_summary.summary"),
)
"""Names that families give to the layer that computes the logits of classes."""


def build(model: ModelConfig, head: Head, vocab_size: int | None = None, source: ModelSource | None = None) -> Any:
    """Build a model in float32 with a head.

    New weights are drawn from torch's global generator, so seed it first.

    Args:
        vocab_size: vocabulary size of a new model whose tokenizer was trained by the run itself, or of a model with a
            source whose table of embeddings gets new rows; None keeps the size.
        source: the resolved ``model.source``; resolved here if it is None.
    Raises:
        UserError: the source is not available, or a kept head does not fit ``head``.
    """
    if source is None and model.source is not None:
        source = resolve_source(model.source)
    network = _network(model, head, vocab_size, source)
    # What its calls return beside the outputs, which some models cannot save.
    network.config.output_attentions = network.config.output_hidden_states = False
    if head.vectors is None:
        return network
    return SentenceEncoder(network, new_content(model, head.vectors, source))


def num_outputs(model: ModelConfig, head: Head, shape: EncoderShape, source: ModelSource | None = None) -> int:
    """Return the number of values in one output of a model to build: classes, or numbers of a vector.

    Args:
        shape: shape of the model that it starts from, or of its encoder.
        source: the resolved ``model.source``; None for a new model.
    Raises:
        UserError: a vector cannot be made of the source's states.
    """
    is_static = model.layers == "static"
    if head.vectors is None:
        if is_static:
            remedy = "Take a task of vectors, or " + override("student", "truncated")
            raise UserError(".model.layers", "static", "is a table of token vectors, without a head", remedy)
        return head.num_labels
    modules = vector_modules(model, head.vectors, source)
    if is_static and modules != VectorModules():
        problem = "a static student has the normalized mean of all its tokens"
        raise UserError("student", "static", problem, "Leave out task.pooling, task.normalize and task.include_prompt.")
    return modules.width(shape.width)


def _network(model: ModelConfig, head: Head, vocab_size: int | None, source: ModelSource | None) -> PreTrainedModel:
    """Build a model as ``build`` does, without modules that make vectors."""
    network: PreTrainedModel
    config = read_config(model, source)
    auto: Any = getattr(transformers, auto_name(head, config))
    if model.head == "keep" and source is not None:
        network = _load(source, auto, model, vocab_size, task=head.task)
        if head.task:
            _order_outputs(network, source, model, head)
        return network
    if vocab_size is not None:
        config.vocab_size = vocab_size
    if model.layers == "static" and source is not None:
        return _static(model, config, source)
    head.describe(config)
    if source is not None and model.layers != "random" and reads_images(config):  # all layers, and a new head
        network = _load(source, auto, model, config=config, ignore_mismatched_sizes=True)
        output_layer(network).reset_parameters()  # with as many classes, the weights would be those of another task
        return network
    network = auto.from_config(config, dtype=torch.float32)
    if source is not None and model.layers != "random":
        _copy_layers(_load(source, AutoModel, model, vocab_size), network, model.layers)
    return network


def _static(model: ModelConfig, config: Any, source: ModelSource) -> PreTrainedModel:
    """Return a table of tokens with the vectors that the source gives them, not divided by their lengths."""
    content = source_folder(source) or SentenceFolder()
    if content.modules.is_normalized:
        content = replace(content, modules=replace(content.modules, layers=content.modules.layers[:-1]))
    table = StaticModel(config)
    fill_table(table, SentenceEncoder(_load(source, AutoModel, model), content).eval(), source.tokenizer())
    return table


def _load(
    source: ModelSource, auto: Any, model: ModelConfig, vocab_size: int | None = None, task: str = "", **options: Any
) -> PreTrainedModel:
    """Load a model in float32; only its head and its pooler may be new, and with a ``task`` that it keeps, neither.

    Args:
        vocab_size: number of embeddings, of which those beyond its own are new; None keeps its own.
    """
    network: PreTrainedModel
    network, info = source.load(auto.from_pretrained, dtype=torch.float32, output_loading_info=True, **options)
    require_all(network, info, source, model)
    if task and info["missing_keys"] and not model.allow_missing:
        problem = f"{source.name} has no head for the task {task}"
        raise UserError("teacher.fine_tuned", True, problem, "Fine-tune it: " + override("teacher.fine_tuned", False))
    if vocab_size is not None and vocab_size > network.config.vocab_size:
        network.resize_token_embeddings(vocab_size, mean_resizing=False)
    return network


def load_model(folder: Path, head: Head) -> PreTrainedModel:
    """Return the model that a stage, or another program, saved in ``folder``, with its head.

    Raises:
        UserError: it cannot be read; the message names no options of runs.
    """
    try:
        network: PreTrainedModel = build(ModelConfig(source=str(folder), head="keep"), head)
    except UserError as error:
        if error.key.startswith("task."):
            raise
        raise UserError("folder", folder, error.problem, "Repair its files, or save the model again.") from error
    return network


def require_cuttable(model: ModelConfig, source: ModelSource | None = None) -> None:
    """Check that the source of a model can be cut to its layers, without reading weights.

    A model whose code comes with it is not checked, since its class is known only after loading.

    Args:
        source: the resolved ``model.source``; resolved here if it is None.
    Raises:
        UserError: the family does not have the depth that is asked for, or names its layers in another way.
    """
    if model.source is None or model.num_layers is None or model.layers == "random" or trusts_code():
        return
    source = source or resolve_source(model.source)
    cut_config = read_config(model, source)
    try:
        with torch.device("meta"):
            _copy_layers(AutoModel.from_config(source.config()), AutoModel.from_config(cut_config), model.layers)
    except Exception as error:  # each family refuses in its own way
        reason = error.problem if isinstance(error, UserError) else root_cause(error)
        problem = f"a model of type {cut_config.model_type} cannot be cut to some of its layers ({reason})"
        remedy = "Leave it out, or take a model of another family."
        raise UserError(".model.num_layers", model.num_layers, problem, remedy) from error


def _copy_layers(source: PreTrainedModel, target: PreTrainedModel, init: Init) -> None:
    """Copy embeddings, some of the layers and the pooler, which comes with the backbone as in PKD's code.

    If the layers of a family share their weights (ALBERT), all weights are copied. ModernBERT's first layer has no norm
    before its attention, so a layer that becomes the first one loses this norm. A pooler that the source does not have
    (NomicBERT) gets new weights.
    """
    layers = layers_to_copy(source.config.num_hidden_layers, target.config.num_hidden_layers, init)
    targets = {layer - 1: number for number, layer in enumerate(layers)}
    prefix, depth = "", source.config.num_hidden_layers
    if getattr(source.config, "num_hidden_groups", None) is None:  # else layers share their weights
        # The first list with one module per layer; lists within a layer come after it.
        lists = ((name, part) for name, part in source.named_modules() if isinstance(part, nn.ModuleList))
        prefix = f"{next(name for name, part in lists if len(part) == depth)}."
    weights = {}
    for name, tensor in source.state_dict().items():
        if prefix and name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) in targets:
                weights[f"{prefix}{targets[int(number)]}.{rest}"] = tensor
        elif layers or name.startswith("embeddings."):
            weights[name] = tensor
    missing, unexpected = target.base_model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if layers and not name.startswith("pooler.")]
    unexpected = [name for name in unexpected if not name.startswith(("pooler.", f"{prefix}0.attn_norm."))]
    if missing or unexpected:
        problem = f"its weights do not fit: {', '.join([*missing, *unexpected][:3])}"
        raise UserError(".model.source", source.config.name_or_path, problem)


def _order_outputs(network: PreTrainedModel, source: ModelSource, model: ModelConfig, head: Head) -> None:
    """Put the outputs of a kept head in the task's order by their names, or by the labels that the user gives them."""
    if (order := head.output_order(model.output_names(source.label_names, source.name))) is not None:
        outputs = output_layer(network)
        for name, parameter in list(outputs.named_parameters(recurse=False)):
            rows = torch.cat([parameter.detach(), torch.zeros_like(parameter[:1])])  # -1 is an output that is always 0
            setattr(outputs, name, nn.Parameter(rows[list(order)]))
        outputs.out_features = len(order)
    head.describe(network.config)


def output_layer(model: nn.Module) -> nn.Linear:
    """Return the layer (C, H) that computes the logits of a sequence classification model, found by its name.

    The order of the modules does not identify it: XLM-R and CamemBERT register their head before the encoder.

    Raises:
        UserError: the family uses another name for it.
    """
    for name in OUTPUT_LAYERS:
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(layer, nn.Linear):
            return layer
    problem = f"the head of a {type(model).__name__} has no layer 'classifier' or 'classifier.out_proj'"
    raise UserError("teacher.fine_tuned", True, problem, "Take a teacher of another family.")


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
