"""Vectors of texts: an encoder with pooling, dense layers and normalization after it.

Such models are saved and read as folders of sentence-transformers.

Shapes: B texts of T tokens in total, packed, or padded to L tokens; H features of a state, C numbers of a vector.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from distill_runner.common.errors import UserError, override, root_cause
from distill_runner.datasets.batches import Batch
from distill_runner.models.adapters import tensor_shapes
from distill_runner.models.config import Similarity, VectorOptions
from distill_runner.models.metadata import CONFIG, MODULES, SETTINGS, read_json, unread_keys
from distill_runner.models.static import STATIC, StaticModel

if TYPE_CHECKING:
    from distill_runner.models.config import ModelConfig
    from distill_runner.models.sources import ModelSource

PoolingMode = Literal["mean", "cls", "last"]
_ACTIVATIONS = {name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")}
LENGTHS = "sentence_bert_config.json"
"""File with the maximum length; of other families, it has their name instead of bert."""
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NAMES: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
UNLIMITED = 2**31
"""Number of tokens from which a maximum is none; tokenizers without one have 10**30."""
_REMEDY = f"Poolings that are read: {', '.join(_NAMES.values())}; modules: Pooling or {STATIC}, Dense and Normalize."


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling, with its activation.

    Attributes:
        activation: name of the class in ``torch.nn``.
        file: file that holds the layer's weights; None for new weights.
    """

    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"
    file: Path | None = None


@dataclass(frozen=True)
class VectorModules:
    """The modules after an encoder, in their order: pooling, then dense layers and normalizations.

    Attributes:
        pooling: ``mean`` of all tokens, the first token (``cls``) or the ``last`` one.
        include_prompt: whether the pooling reads the tokens of the prompt; the special token before it counts as one.
        layers: what follows the pooling; None is a normalization.
    """

    pooling: PoolingMode = "mean"
    include_prompt: bool = True
    layers: tuple[Dense | None, ...] = (None,)

    def width(self, encoder_width: int) -> int:
        """Return the number of numbers in a vector."""
        return [encoder_width, *(layer.out_features for layer in self.layers if layer is not None)][-1]

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.layers) and self.layers[-1] is None


class DenseLayer(nn.Module):
    """Linear layer and activation, with the parameters' names of sentence-transformers."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, dense.bias)
        self.activation = _ACTIVATIONS[dense.activation]()

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.activation(self.linear(x_BC))


class Normalization(nn.Module):
    """Division of each vector by its length."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return functional.normalize(x_BC, dim=-1)


@dataclass
class VectorOutput(ModelOutput):
    """Output of ``SentenceEncoder``: the vectors (B, C) as ``sentence_embedding``."""

    sentence_embedding: Tensor | None = None


class SentenceEncoder(nn.Module):
    """An encoder of ``transformers`` with the modules that make one vector of a text.

    What it has not itself, such as ``config``, is that of its encoder.

    Args:
        encoder: model without a head.
        content: what follows the encoder, and what its saved folder says besides. The weights of dense layers are read
            from their folders.
    """

    base_model_prefix = "encoder"

    def __init__(self, encoder: Any, content: SentenceFolder) -> None:
        super().__init__()
        self.encoder, self.content, self.modules_after = encoder, content, content.modules
        layers = [Normalization() if layer is None else DenseLayer(layer) for layer in content.modules.layers]
        self.head = nn.Sequential(*layers)
        for dense, layer in zip(content.modules.layers, layers, strict=True):
            if dense is not None and (file := dense.file) is not None:
                layer.load_state_dict(torch.load(file, weights_only=True) if file.suffix == ".bin" else load_file(file))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "encoder":
                raise
            return getattr(self.encoder, name)

    @property
    def base_model(self) -> Any:
        return self.encoder

    def save_pretrained(self, folder: Path) -> None:
        """Save the encoder and its modules in the layout of sentence-transformers."""
        self.encoder.save_pretrained(folder)
        write_modules(Path(folder), self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> VectorOutput:
        """Return the vectors of padded texts. Tokens of a prompt that the pooling leaves out are not known here."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states_BLH = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **segments).last_hidden_state
        return VectorOutput(self.head(self._pool_padded(states_BLH, attention_mask)))

    def _pool_padded(self, states_BLH: Tensor, mask_BL: Tensor) -> Tensor:
        if self.modules_after.pooling == "mean":
            weight_BL1 = mask_BL[..., None].to(states_BLH.dtype)
            return (states_BLH * weight_BL1).sum(1) / weight_BL1.sum(1)
        place_BL = mask_BL.cumsum(1) * mask_BL  # of each token in its text, from 1; the padding may be on either side
        token_B = place_BL.argmax(1) if self.modules_after.pooling == "last" else (place_BL == 1).int().argmax(1)
        return states_BLH.gather(1, token_B[:, None, None].expand(-1, 1, states_BLH.shape[-1])).squeeze(1)

    @property
    def skips_prompt(self) -> bool:
        """Whether the pooling leaves out tokens of a prompt; padded texts then give other vectors than packed ones."""
        is_skipped = not self.modules_after.include_prompt and self.modules_after.pooling != "last"
        return is_skipped and any(self.content.prompts.values())

    @property
    def reads_first_only(self) -> bool:
        """Whether the pooling reads the first token alone."""
        return self.modules_after.pooling == "cls" and self.modules_after.include_prompt

    def pool(self, h_TH: Tensor, batch: Batch) -> Tensor:
        """Return the pooled states (B, H) of packed texts, in float32 at least, from the states of all their tokens."""
        skipped_B = None if self.modules_after.include_prompt else batch.skipped
        if self.modules_after.pooling == "last":
            return h_TH.index_select(0, batch.starts + batch.sequence_lengths - 1)
        if self.modules_after.pooling == "cls":
            return h_TH.index_select(0, batch.starts if skipped_B is None else batch.starts + skipped_B)
        return batch.means(h_TH.to(torch.promote_types(h_TH.dtype, torch.float32)), skipped_B)


# Folders of sentence-transformers


@dataclass(frozen=True)
class SentenceFolder:
    """What a folder of sentence-transformers says besides its encoder.

    Attributes:
        modules: the modules after the encoder.
        max_length: maximum number of tokens of a text: its own, or that of its tokenizer; None if neither has one.
        prompts: text by name that is put before the texts of a use, such as ``query``.
        default_prompt: name of the prompt that texts get if none is named; None for no prompt.
        similarity: how its vectors are compared.
        unread_keys: keys of its files that are not read, as ``metadata.unread_keys`` returns them.
    """

    modules: VectorModules = VectorModules()
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    unread_keys: tuple[str, ...] = ()


def source_folder(source: ModelSource | None) -> SentenceFolder | None:
    """Return what the folder of a source says, with its files downloaded; None without a folder of its kind.

    Raises:
        UserError: as ``read_sentence_folder``.
    """
    return None if source is None else read_sentence_folder(source.download(), source.name)


def read_sentence_folder(folder: Path, name: str) -> SentenceFolder | None:
    """Return what the folder says; None if it has no modules after its encoder.

    Args:
        name: what the user typed for the folder.
    Raises:
        UserError: the folder is damaged, or has modules that are not read.
    """
    try:
        is_pair_model = read_json(folder / SETTINGS).get("model_type") == "CrossEncoder"  # its one module has a head
        return _content(folder) if (folder / MODULES).is_file() and not is_pair_model else None
    except UserError as error:
        raise UserError(error.key, name, error.problem, error.remedy) from error
    except Exception as error:
        problem = f"its files of sentence-transformers are damaged: {root_cause(error)}"
        raise UserError(".model.source", name, problem, "Save it again with SentenceTransformer.save.") from error


def _content(folder: Path) -> SentenceFolder:
    # As sentence-transformers reads them: in the order of the list, the last one of a name in the place of the first.
    entries = [*{str(entry["name"]): entry for entry in read_json(folder / MODULES)}.values()]
    types = [str(entry["type"]) for entry in entries]
    kinds = [one.rpartition(".")[2] if one.startswith("sentence_transformers.") else one for one in types]
    modules = _modules(folder, entries, kinds)
    files = sorted(folder.glob("sentence_*_config.json"), key=lambda file: file.name != LENGTHS)
    lengths: Any = next(map(read_json, files), {})
    settings, tokenizer = read_json(folder / SETTINGS), read_json(folder / "tokenizer_config.json")
    prompts = {key: str(text) for key, text in (settings.get("prompts") or {}).items() if text}
    default = settings.get("default_prompt_name") or None
    if default not in {None, "query", "document"} | (settings.get("prompts") or {}).keys():
        problem = f"has default_prompt_name={default}, but no prompt of this name"
        raise UserError(".model.source", None, problem, f"Its prompts: {', '.join(prompts) or 'none'}.")
    default = default if default in prompts else None
    if (similarity := settings.get("similarity_fn_name") or "cosine") not in get_args(Similarity):
        problem = f"has similarity_fn_name={similarity}, which is not read"
        raise UserError(".model.source", None, problem, f"Known: {', '.join(get_args(Similarity))}.")
    limits = lengths.get("max_seq_length"), tokenizer.get("model_max_length"), UNLIMITED
    if (max_length := next(limit for limit in limits if limit is not None)) < 1:
        remedy = "Give the number of tokens at which texts are cut."
        raise UserError(".model.source", None, f"has max_seq_length={max_length}", remedy)
    length = int(max_length) if max_length < UNLIMITED else None
    contents = [(entry, MODULES) for entry in entries] + [(lengths, LENGTHS), (settings, SETTINGS)]
    paths = zip(kinds[1:], entries[1:], strict=True)
    contents += [(read_json(folder / entry["path"] / CONFIG), f"{kind}/{CONFIG}") for kind, entry in paths]
    unread = tuple(text for content, kind in contents for text in unread_keys(content, kind, folder.name))
    return SentenceFolder(modules, length, prompts, default, cast("Similarity", similarity), unread)


def _modules(folder: Path, entries: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> VectorModules:
    is_static = kinds[:1] == [STATIC]
    if not is_static and (kinds[:2] != ["Transformer", "Pooling"] or entries[0].get("path")):
        is_below = kinds[:2] == ["Transformer", "Pooling"]
        problem = f"begins with {', '.join(kinds[:2])}{' in a subfolder' if is_below else ''}, which is not read"
        remedy = "Save it again: SentenceTransformer(<folder>).save(<new folder>)." if is_below else _REMEDY
        raise UserError(".model.source", None, problem, remedy)
    pooling = {} if is_static else read_json(folder / entries[1]["path"] / "config.json")
    # In today's spelling, or the older one.
    modes = pooling.get("pooling_mode") or [mode for flag, mode in POOLING_FLAGS.items() if pooling.get(flag)] or "mean"
    mode = " + ".join([modes] if isinstance(modes, str) else modes)
    if mode not in _NAMES:
        raise UserError(".model.source", None, f"has the pooling {mode}, which is not read", _REMEDY)
    layers: list[Dense | None] = []
    for kind, entry in [*zip(kinds, entries, strict=True)][1 if is_static else 2 :]:
        if kind in ("Normalize", "Dense"):
            layers.append(_dense(folder / entry["path"]) if kind == "Dense" else None)
        elif kind != "Dropout":  # does nothing in evaluation
            raise UserError(".model.source", None, f"has a module {kind}, which is not read", _REMEDY)
    width = read_json(folder / CONFIG).get("hidden_size")  # some families have another name for it
    for dense in filter(None, layers):
        if width not in (None, dense.in_features):
            raise ValueError(f"a dense layer reads {dense.in_features} numbers, of which there are {width}")
        width = dense.out_features
    return VectorModules(_NAMES[mode], bool(pooling.get("include_prompt", True)), tuple(layers))


def _dense(folder: Path) -> Dense:
    config = read_json(folder / "config.json")
    path = str(config.get("activation_function", "torch.nn.Tanh"))
    activation = path.rpartition(".")[2] if path.startswith("torch.nn.") else path
    extra = config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    if activation not in _ACTIVATIONS or extra:
        problem = f"has a dense layer with {activation}, or a residual, which is not read"
        remedy = f"Read are those with {', '.join(_ACTIVATIONS)}, from vector to vector."
        raise UserError(".model.source", None, problem, remedy)
    dense = Dense(config["in_features"], config["out_features"], config.get("bias", True), activation)
    file = next(filter(Path.is_file, (folder / one for one in ("model.safetensors", "pytorch_model.bin"))), None)
    shapes = {f"linear.{name}": tuple(weight.shape) for name, weight in DenseLayer(dense).linear.named_parameters()}
    if file is None or tensor_shapes(file) != shapes:
        raise ValueError(f"{folder.name} lacks its weights, or has those of other sizes")
    return replace(dense, file=file)


def vector_modules(model: ModelConfig, options: VectorOptions, source: ModelSource | None) -> VectorModules:
    """Return the modules after the encoder of a model to build.

    A kept head has those of its folder. A new one has them too, but for options of the task; without a folder of
    sentence-transformers, it has a normalized mean, as a static student always has.

    Args:
        source: the model's source; None for a new model.
    Raises:
        UserError: a kept head is no folder of sentence-transformers, or its folder cuts texts at fewer tokens.
    """
    content = None if model.layers == "static" else source_folder(source)
    if model.head == "keep" and source is not None:
        if content is None:
            problem = f"holds no {MODULES}: how its states become a vector is not known"
            remedy = "Take a folder of sentence-transformers, or train it: " + override("teacher.fine_tuned", False)
            raise UserError(".model.source", source.name, problem, remedy)
        if options.max_length > (content.max_length or options.max_length):
            problem = f"{source.name} was made for {content.max_length} tokens, at which sentence-transformers cuts"
            remedy = override("task.max_length", content.max_length)
            raise UserError("task.max_length", options.max_length, problem, remedy)
        return content.modules
    modules = VectorModules() if content is None else content.modules
    layers = modules.layers
    if options.normalize is not None and options.normalize != modules.is_normalized:
        layers = (*layers, None) if options.normalize else layers[:-1]
    prompt = modules.include_prompt if options.include_prompt is None else options.include_prompt
    return replace(modules, pooling=options.pooling or modules.pooling, include_prompt=prompt, layers=layers)


def new_content(model: ModelConfig, options: VectorOptions, source: ModelSource | None) -> SentenceFolder:
    """Return what the folder of a model to build will say: what that of its source says, but for the task's options."""
    modules, content, own = vector_modules(model, options, source), source_folder(source), dict(options.prompts)
    prompts, default = (content.prompts | own, content.default_prompt) if content else (own, None)
    if "text" in own and prompts.get(default or "") != own["text"]:
        default = "text"
    if own.get("text") == "":
        prompts.pop("text", None)
    default = default if prompts.get(default or "") else None
    return SentenceFolder(modules, options.max_length, prompts, default, options.similarity)


def write_modules(folder: Path, model: SentenceEncoder) -> None:
    """Write the modules of a model beside its encoder, as ``SentenceTransformer(folder)`` reads them."""
    modules = model.modules_after
    flags = {flag: _NAMES.get(mode) == modules.pooling for flag, mode in POOLING_FLAGS.items()}
    is_static = isinstance(model.encoder, StaticModel)
    pooling = {"word_embedding_dimension": int(model.config.hidden_size), **flags}
    first = [STATIC] if is_static else ["Transformer", "Pooling"]
    files: dict[str, Any] = {}
    if not is_static:
        files["1_Pooling/config.json"] = pooling | {"include_prompt": modules.include_prompt}
    kinds = [*first, *("Normalize" if dense is None else "Dense" for dense in modules.layers)]
    paths = ["." if is_static else "", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    for path in paths[1:]:
        shutil.rmtree(folder / path, ignore_errors=True)
        (folder / path).mkdir(parents=True)
    for path, dense, layer in zip(paths[len(first) :], modules.layers, model.head, strict=True):
        if dense is not None:
            activation = _ACTIVATIONS[dense.activation]
            config = {name: getattr(dense, name) for name in ("in_features", "out_features", "bias")}
            config["activation_function"] = f"{activation.__module__}.{activation.__name__}"
            files[f"{path}/config.json"] = config
            weights = {key: value.detach().float().contiguous().cpu() for key, value in layer.state_dict().items()}
            save_file(weights, folder / path / "model.safetensors")
    files[MODULES] = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    content = model.content
    files[LENGTHS] = {"max_seq_length": content.max_length, "do_lower_case": False}
    settings = {"prompts": content.prompts, "default_prompt_name": content.default_prompt}
    files[SETTINGS] = settings | {"similarity_fn_name": content.similarity}
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)  # the file may be a hard link to a file in the store
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
