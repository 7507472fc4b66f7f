"""Description of a model to build: options for its source and initial weights, the head it needs, and a size check."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unicodedata import normalize

from pydantic import Field

from distill_runner.common.errors import UserError, format_typed, override, quantity
from distill_runner.common.schema import Assumption, Schema

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation")
Init = Literal["first", "first_last", "group_top", "alternate", "random", "embeddings_only", "static"]


class ModelConfig(Schema):
    """Source and initial weights of a model.

    Args:
        source: a hub id, optionally with a revision (``<id>@<revision>``), or a folder. ``package:<module>/<folder>``
            names a folder in an installed package, ``stage:<name>`` the model of an earlier stage. None makes a new
            model of ``architecture``.
        tokenizer: source of the tokenizer, in the same forms as ``source``, or ``corpus`` for a vocabulary trained on
            the stage's corpus. None takes the tokenizer of ``source``.
        num_layers: number of layers of the model; None keeps the number of the source or of ``architecture``. A model
            that copies no layers may have more layers than its source.
        layers: layers of the source to copy. ``first`` copies the lowest layers (ALP-KD, PKD),
            ``first_last`` the lowest ones and, as its top, the source's last layer. The other two divide the
            source's layers into as many equal groups as the model has layers: ``group_top`` copies the top layer of
            each group (internal representations), ``alternate`` the bottom layer (DistilBERT). ``embeddings_only``
            copies no layers but the embeddings; ``random`` copies no weights. ``static`` makes a table of tokens, from
            the source's vectors of them (``models.static``).
        head: ``new`` for a new head, or ``keep`` for the head of a fine-tuned source. The outputs of a kept head are
            put in the task's order by name.
        labels: names of a kept head's outputs, for a head whose configuration does not name them (LABEL_0, ...).
        architecture: configuration of a new model, with its ``model_type``.
        resize: give the source's table of embeddings a new row for each token that its tokenizer has beyond them, such
            as tokens that were added later. Otherwise such a tokenizer is an error.
        allow_missing: give new weights to tensors that the source's files lack. Otherwise they are an error, except a
            new head and a pooler.
        vocabulary: tokens of the model. ``full`` keeps those of the tokenizer. ``trim`` keeps those that the training
            texts of this stage, and of the stages that it continues, use (``models.vocabulary``). The model loses the
            embeddings of the others before it is trained, so all its scores are those of the smaller vocabulary.
    """

    source: str | None = None
    tokenizer: str | None = None
    num_layers: int | None = Field(None, ge=1)
    layers: Annotated[
        Init,
        Assumption(
            "bounds of groups that do not divide evenly are rounded down", "internal representations", "group_top"
        ),
        Assumption("bounds of groups that do not divide evenly are rounded down", "DistilBERT", "alternate"),
    ] = "first"
    head: Literal["new", "keep"] = "new"
    labels: list[str] | None = None
    architecture: dict[str, Any] | None = None
    resize: bool = False
    allow_missing: bool = False
    vocabulary: Literal["full", "trim"] = "full"

    def require_depth(self, depth: int) -> None:
        """Raise a UserError if the model copies more layers than the ``depth`` of its source."""
        copies_layers = self.source is not None and self.layers not in ("random", "embeddings_only", "static")
        if copies_layers and self.num_layers is not None and self.num_layers > depth:
            problem = f"must be between 1 and {depth}, the layers of {self.source}" if depth else "its source has none"
            raise UserError(".model.num_layers", self.num_layers, problem)

    def output_names(self, label_names: Mapping[int, str] | None, source_name: str) -> Mapping[int, str] | None:
        """Return the names of a kept head's outputs: those of the user, or else those of its configuration.

        Args:
            label_names: names in the configuration (``id2label``); None if it has none.
            source_name: name of the model, for the message.
        Raises:
            UserError: the user names another number of outputs.
        """
        if not self.labels:
            return label_names
        if label_names and len(self.labels) != len(label_names):
            problem = f"names {quantity(len(self.labels), 'output')}, but the head of {source_name} has "
            problem += f"{len(label_names)}: {format_typed(list(label_names.values()))}"
            raise UserError("teacher.labels", format_typed(self.labels), problem)
        return dict(enumerate(self.labels))


def layers_to_copy(source_layers: int, num_layers: int, init: Init) -> list[int]:
    """Return the numbers (from 1) of the source's layers that a student of ``num_layers`` copies; empty if none.

    If ``num_layers`` does not divide ``source_layers``, the bounds of the groups are rounded down.
    """
    n, m = source_layers, num_layers
    match init:
        case "first":
            return list(range(1, m + 1))
        case "first_last":
            return [*range(1, m), n]
        case "group_top":
            return [j * n // m for j in range(1, m + 1)]
        case "alternate":
            return [j * n // m + 1 for j in range(m)]
    return []


Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True)
class VectorOptions:
    """What a task says on the vectors of its models, and on the texts that they are made of.

    Attributes:
        pooling, normalize, include_prompt: as in ``VectorModules``; None takes what the model's source says.
        prompts: text by name that is put before texts: ``text`` before all, or ``query`` and ``document``.
        max_length: maximum number of tokens of a text.
        similarity: how scores compare two vectors.
    """

    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool | None = None
    include_prompt: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    max_length: int = 512
    similarity: Similarity = "cosine"


@dataclass(frozen=True)
class Head:
    """A head that a task or a corpus requires.

    Attributes:
        auto: name of the class of ``transformers`` that builds a model with this head.
        names: names of the outputs, in the task's order; None if the outputs have no names.
        problem_type: ``problem_type`` of ``transformers``, for saved configurations.
        task: name of the task, for messages. Empty for a language model, which may lack weights in the source.
        keeps_order: whether the outputs of a kept head already have the task's order, whatever their names.
        vectors: options of the modules that make a vector of a text; None for a head of ``auto``. The number of
            outputs then depends on the model.
    """

    auto: str
    names: tuple[str, ...] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    task: str = ""
    keeps_order: bool = False
    vectors: VectorOptions | None = None

    @property
    def num_labels(self) -> int:
        """Number of values in one output; 0 for a language model, whose outputs cover its vocabulary."""
        return len(self.names or ())

    def describe(self, config: "PreTrainedConfig") -> None:
        """Write names, number and ``problem_type`` of the outputs, if they have names, into a model's configuration."""
        if self.names is not None:
            config.id2label = dict(enumerate(self.names))
            config.label2id = {name: number for number, name in enumerate(self.names)}
            config.problem_type = self.problem_type

    def output_order(self, label_names: Mapping[int, str] | None) -> list[int] | None:
        """Return the indices of a kept head's outputs in this head's order; None if the order stays unchanged.

        An index of -1 stands for a logit that is always 0: a single logit z, which is that of one of two classes, has
        the probability sigmoid(z) = softmax([0, z])[1].

        Args:
            label_names: names of the kept head's outputs by index (``id2label``); None if it has none.
        Raises:
            UserError: the kept head has other outputs.
        """
        if self.names is None or self.keeps_order:
            return None
        names = () if self.problem_type == "regression" else self.names
        head = [label_names[number] for number in sorted(label_names)] if label_names else []
        is_single = self.problem_type == "single_label_classification" and (len(names), len(head)) == (2, 1)
        if head and len(head) != max(1, len(names)) and not is_single:
            problem = f"its head has {len(head)} outputs {format_typed(head)}, the task {self.task} needs "
            problem += f"{len(names)} {format_typed([*names])}" if names else "1 (a score)"
            raise UserError("teacher", None, problem, f"Choose a teacher fine-tuned on {self.task}.")
        outputs = {normalized_label(name): number for number, name in enumerate(head)}
        order = [outputs.get(normalized_label(name), -1) for name in names] or [0]
        if order.count(-1) == is_single:
            return order
        problem = f"the outputs of its head {format_typed(head)} are not named like the classes of {self.task}"
        example = override("teacher.labels", [*names[is_single:]])
        raise UserError("teacher", None, problem, "Name them in the head's own order, such as " + example)

    def output_texts(self, label_names: Mapping[int, str]) -> list[str]:
        """Return for each class the output of a kept head that it is, as a text; empty if the order stays unchanged.

        Raises:
            UserError: the kept head has other outputs.
        """
        order = self.output_order(label_names)
        if order is None or self.problem_type == "regression":
            return []
        texts = [f"output {number} ({label_names[number]})" if number >= 0 else "the rest" for number in order]
        return [f"sigmoid of {text}" if -1 in order and text != "the rest" else text for text in texts]


LANGUAGE_MODEL = Head("AutoModelForMaskedLM")
PRE_TRAINING = Head("AutoModelForPreTraining")
"""BERT's two heads: masked language modeling and next sentence prediction."""


def normalized_label(name: str) -> str:
    """Return a class name in lower case, with ``_`` and ``-`` replaced by spaces (``-1`` and ``1`` still differ).

    Letters with accents are the same whether they are one character or two.
    """
    return normalize("NFC", re.sub(r"[\s_-]+", " ", name.strip()).casefold())


def check_config(config: "PreTrainedConfig", key: str, value: Any) -> None:
    """Check what ``transformers`` itself checks only when it builds a model: that the sizes are possible and fit.

    Args:
        key, value: the option of the run that names the model, for the message.
    Raises:
        UserError: a field is out of range, two fields do not fit each other, or the model does not fit into memory.
    """
    from transformers.activations import ACT2FN

    ranges: list[tuple[Sequence[str], Any, Callable[[Any], bool], str]] = [
        ((*SIZES, "max_position_embeddings"), int, lambda size: size >= 1, "a whole number above 0"),
        (DROPOUTS, int | float, lambda share: 0 <= share < 1, "a number from 0 to below 1"),
        (_ACTIVATIONS, str, lambda name: name in ACT2FN, "a known activation"),
    ]
    problems = [
        f"has {name}={str(one)[:40]}, which is not {expected}"
        for names, kind, fits, expected in ranges
        for name in names
        if isinstance(one := getattr(config, name, None), kind) and not fits(one)
        if not isinstance(getattr(type(config), name, None), property)  # XLNet's -1: no limit
    ]
    width, heads = getattr(config, "hidden_size", 1), max(getattr(config, "num_attention_heads", 1), 1)
    has_own_size = getattr(config, "head_dim", None) not in (None, width // heads)  # Qwen3 and T5: any number of heads
    inside = getattr(config, "true_hidden_size", width)
    if not problems and inside % heads and not has_own_size:
        problems.append(f"has {heads} heads, which do not divide its width, {width}")
    layers, _, _, inner_width, words = (getattr(config, name, None) or 1 for name in SIZES)
    layers = min(layers, getattr(config, "num_hidden_groups", layers))  # ALBERT shares weights in groups
    rows = words + getattr(config, "max_position_embeddings", 1)
    needed = 4 * (rows * min(getattr(config, "embedding_size", width), width))
    needed += 4 * layers * (4 * inside**2 + 2 * inside * inner_width)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        problems.append(f"needs {needed / 1e9:,.0f} GB, and this machine has {memory / 1e9:.0f} GB of memory")
    if problems:
        remedy = "Correct its config.json, or use another model."
        raise UserError(key, value, f"its configuration {problems[0]}", remedy)
