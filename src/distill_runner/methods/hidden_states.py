"""Distillation of hidden states: the [CLS] states of layers, the states of all tokens, and the embeddings.

``HiddenStateLoss`` is one term for PKD, CKD and ALP-KD, which differ in options only (Eqs. 3-7), and for the term
``cos`` of internal representations. A ``Combination`` turns the states of several teacher layers into one target for a
student layer: it selects, concatenates or attends. ``TokenStateLoss`` and ``EmbeddingLoss`` are the terms of TinyBERT
and DistilBERT, ``PooledStateLoss`` that of RAIL-KD (Haidar et al. 2022, arXiv 2109.10164).
``conf/method/{pkd,ckd,alp,pkd_original,internal,tinybert,distilbert,rail}.yaml`` choose the options.

Shapes: B examples, H features, J student layers that are compared together, K teacher layers of each, A attention heads
of D features each. One operation compares all J layers, since a GPU takes longer to start a kernel than to run it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from distill_runner.common.errors import UserError, override
from distill_runner.common.schema import Assumption, Schema
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import LayeredTerm, LossTerm, Progress
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Outputs
from distill_runner.models.features import EncoderShape, FeatureRequest, Features


def normalized_squared_distance(student_BH: Tensor, teacher_BH: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """Squared distance of the L2-normalized states, 0 to 4 (ALP-KD Eq. 3, PKD): sum over features, mean over rows.

    ALP-KD prints a minus sign before the sum, which is a slip: the distance is minimized.
    """
    return mean_over_rows((_normalize(student_BH) - _normalize(teacher_BH)).square().sum(-1, keepdim=True), weights_B)


def mean_squared_error(student_BH: Tensor, target_BH: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """Squared error, mean over the features and the rows (ALP-KD Eq. 7)."""
    return mean_over_rows((student_BH - target_BH).square(), weights_B)


def normalized_mean_squared_error(student_BH: Tensor, teacher_BH: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """``normalized_squared_distance`` as in PKD's published code: mean instead of sum over the features."""
    return mean_squared_error(_normalize(student_BH), _normalize(teacher_BH), weights_B)


def cosine_distance(student_BH: Tensor, teacher_BH: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """1 minus the cosine similarity of the states, 0 to 2; mean over the rows (internal representations, Eq. 3)."""
    return mean_over_rows(1 - functional.cosine_similarity(student_BH, teacher_BH, dim=-1)[..., None], weights_B)


def mean_over_rows(values_BH: Tensor, weights_B: Tensor | None) -> Tensor:
    """Return the mean over features and rows, each row times its weight; of (J, B, H), the mean (J,) of each layer.

    It is not divided by the weights of the batch, so that the batches of an update add up to the update's loss.
    """
    if weights_B is None:
        return values_BH.mean((-2, -1))
    return (values_BH.mean(-1) * weights_B.to(values_BH)).mean(-1)


def attention_entropy(alpha_BAK: Tensor) -> Tensor:
    """Entropy in nats, 0 (all weight on one teacher layer) to ln K (uniform), mean over rows; of (J, B, A, K), (J,)."""
    return -torch.xlogy(alpha_BAK, alpha_BAK).sum(dim=-1).mean((-2, -1))


def _normalize(states_BH: Tensor) -> Tensor:
    return functional.normalize(states_BH, dim=-1)


DISTANCES = {
    "normalized": normalized_squared_distance,
    "mse": mean_squared_error,
    "normalized_mse": normalized_mean_squared_error,
    "cosine": cosine_distance,
}


class Attention(Schema):
    """Attention of a student layer over its teacher layers, by which ALP weighs them.

    Args:
        type: ``dot`` takes the states as they are, without parameters (ALP-KD Eq. 5). ``kqv`` trains projections to
            keys, queries and values (appendix, Table 4).
        heads: number of attention heads of ``kqv``, 1 by default. It must divide the student's width.
        values: value projections of ``kqv``: ``per_layer``, the default, is a separate projection for each teacher
            layer; ``shared`` is one projection for all teacher layers.
        scale: ``sqrt_dim`` divides the scores by the square root of a head's width; ``none`` leaves them unscaled.
        normalize: whether queries and keys, but not values, are L2-normalized, so that the scores are cosines.
    Raises:
        UserError: ``heads`` or ``values`` is set with ``type=dot``.
    """

    type: Annotated[
        Literal["dot", "kqv"],
        Assumption(
            "no output projection after the heads, unlike Vaswani et al.: the paper names keys, queries and values",
            "ALP-KD appendix",
            "kqv",
        ),
    ] = "dot"
    heads: int | None = Field(None, ge=1)
    values: Annotated[
        Literal["per_layer", "shared"] | None,
        Assumption(
            'a separate projection for each layer: "a dedicated value vector for each key"',
            "ALP-KD appendix",
            "per_layer",
        ),
    ] = None
    scale: Annotated[
        Literal["none", "sqrt_dim"],
        Assumption("Eq. 5 has no scale; Vaswani et al., whom the appendix follows, have one", "ALP-KD Eq. 5"),
    ] = "none"
    normalize: Annotated[bool, Assumption("queries and keys are not normalized", "ALP-KD Eq. 5", False)] = False

    @model_validator(mode="before")
    @classmethod
    def _options_of_type(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):
            return options
        if options.get("type") == "kqv":
            return {"heads": 1, "values": "per_layer", **options}
        for key in ("heads", "values"):
            if options.get(key) is not None:
                problem = "attention.type=dot does not use it"
                raise UserError(f"attention.{key}", options[key], problem, override("attention", "kqv1") + " or kqv4.")
        return options


Layers = Mapping[int, list[int]]
"""Teacher layers of each student layer."""
States = Mapping[int, Tensor]
"""States (B, H) by layer."""


class Combination(nn.Module, ABC):
    """Base of modules that build, for supervised student layers, the tensors to compare: states and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[tuple[tuple[int, ...], Tensor]] = []
        """Attention weights (J, B, A, K) of the last forward with their student layers, detached."""

    @property
    def alpha(self) -> dict[int, Tensor]:
        """Attention weights (B, A, K) of the last forward by student layer; empty without attention."""
        return {j: alpha for layers, weights in self.weights for j, alpha in zip(layers, weights, strict=True)}

    def forward(self, layers: Layers, student: States, teacher: States) -> list[tuple[Tensor, Tensor]]:
        """Return states and targets, both (J, B, H), of the student layers that have equally many teacher layers.

        Args:
            layers: teacher layers of each supervised student layer.
            student, teacher: states (B, H) by layer.
        """
        self.weights.clear()
        groups: dict[int, dict[int, list[int]]] = {}
        for j, entry in layers.items():
            groups.setdefault(len(entry), {})[j] = entry
        return [self.compared_pair(group, student, teacher) for group in groups.values()]

    @abstractmethod
    def compared_pair(self, layers: Layers, student: States, teacher: States) -> tuple[Tensor, Tensor]:
        """Return states and targets, both (J, B, H), of J student layers with K teacher layers each."""


class Select(Combination):
    """Combination that takes the single teacher layer of each student layer unchanged (PKD; ALP-KD Eq. 3)."""

    def compared_pair(self, layers: Layers, student: States, teacher: States) -> tuple[Tensor, Tensor]:
        return torch.stack([student[j] for j in layers]), torch.stack([teacher[k] for (k,) in layers.values()])


class Concatenate(Combination):
    """Concatenation of the teacher layers with a trained affine projection (CKD; ALP-KD Eq. 4). Widths may differ.

    Each student layer has a separate projection. The distance after it is a plain mean squared error (``distance``),
    for which ALP-KD names none.

    Args:
        project: ``teacher`` projects the concatenation to the student's width, with ``W_j`` of shape (H, K * H), as
            the paper describes it. ``student`` projects the student's state to the width of the concatenation, as the
            published code of CKD does.
    """

    def __init__(
        self, layers: Layers, width_student: int, width_teacher: int, project: Literal["teacher", "student"]
    ) -> None:
        super().__init__()
        self.project = project
        self.projections = nn.ModuleDict()
        for j, entry in layers.items():
            widths = (len(entry) * width_teacher, width_student)
            self.projections[str(j)] = nn.Linear(*(widths if project == "teacher" else widths[::-1]))

    def compared_pair(self, layers: Layers, student: States, teacher: States) -> tuple[Tensor, Tensor]:
        states = {j: student[j] for j in layers}
        targets = {j: torch.cat([teacher[k] for k in entry], dim=1) for j, entry in layers.items()}
        projected = targets if self.project == "teacher" else states
        projected |= {j: self.projections[str(j)](projected[j]) for j in layers}
        return torch.stack([*states.values()]), torch.stack([*targets.values()])


class Attend(Combination):
    """Mean of the teacher layers, weighted by their similarity to the student layer (ALP-KD Eqs. 5 and 6).

    Gradients flow through the weights into the student. With ``kqv`` every student layer has separate projections, like
    every decoder layer in Vaswani et al.
    """

    def __init__(self, layers: Layers, width_student: int, width_teacher: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.projections = nn.ModuleDict()
        for j, entry in layers.items() if attention.type == "kqv" else ():
            self.projections[str(j)] = KeysQueriesValues(width_student, width_teacher, len(entry), attention)

    def compared_pair(self, layers: Layers, student: States, teacher: States) -> tuple[Tensor, Tensor]:
        states_JBH = torch.stack([student[j] for j in layers])
        if self.projections:  # one layer after the other, since keys and values of all would take much memory
            targets = []
            for j, entry in layers.items():
                keys_BKH = torch.stack([teacher[k] for k in entry], dim=1)
                projected = (states[None] for states in self.projections[str(j)](student[j], keys_BKH))
                targets.append(self._attend((j,), *projected))
            return states_JBH, torch.cat(targets)
        entries = [*layers.values()]
        if all(entry == entries[0] for entry in entries):  # all student layers share them
            entries = entries[:1]
        keys_JBAKH = torch.stack([torch.stack([teacher[k] for k in entry], dim=1) for entry in entries])[:, :, None]
        return states_JBH, self._attend(tuple(layers), states_JBH[:, :, None], keys_JBAKH, keys_JBAKH)

    def _attend(self, layers: tuple[int, ...], query_JBAD: Tensor, key_JBAKD: Tensor, value_JBAKD: Tensor) -> Tensor:
        """Return the targets (J, B, H) of student layers, and keep their weights."""
        alpha_JBAK = attention_weights(query_JBAD, key_JBAKD, self.attention.scale, self.attention.normalize)
        self.weights.append((layers, alpha_JBAK.detach()))
        return (alpha_JBAK[..., None] * value_JBAKD).sum(dim=-2).flatten(2)


class KeysQueriesValues(nn.Module):
    """Trained projections to the student's width, without bias, split into attention heads (ALP-KD, appendix).

    Args:
        width_student, width_teacher: number of features of the states of the two models.
        num_keys: number of teacher layers that the student layer attends to.
        attention: number of heads, and whether each teacher layer has a separate value projection.
    Raises:
        UserError: the number of heads does not divide the student's width.
    """

    def __init__(self, width_student: int, width_teacher: int, num_keys: int, attention: Attention) -> None:
        super().__init__()
        self.heads = attention.heads or 1
        if width_student % self.heads:
            raise UserError("attention.heads", self.heads, f"must divide the student's width, {width_student}")
        self.query = nn.Linear(width_student, width_student, bias=False)
        self.key = nn.Linear(width_teacher, width_student, bias=False)
        num_values = num_keys if attention.values == "per_layer" else 1
        self.values = nn.ModuleList(nn.Linear(width_teacher, width_student, bias=False) for _ in range(num_values))

    def forward(self, student_BH: Tensor, teacher_BKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.values) == 1:
            value_BKH = self.values[0](teacher_BKH)
        else:
            value_BKH = torch.stack([v(teacher_BKH[:, k]) for k, v in enumerate(self.values)], dim=1)
        query_BAD = self.query(student_BH).unflatten(-1, (self.heads, -1))
        return query_BAD, self._split(self.key(teacher_BKH)), self._split(value_BKH)

    def _split(self, states_BKH: Tensor) -> Tensor:
        return states_BKH.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def attention_weights(query_BAD: Tensor, key_BAKD: Tensor, scale: str, normalize: bool) -> Tensor:
    """Softmax over the keys of the dot products, which ``scale`` can divide by sqrt(D): (..., B, A, K)."""
    if normalize:
        query_BAD, key_BAKD = functional.normalize(query_BAD, dim=-1), functional.normalize(key_BAKD, dim=-1)
    # A matmul would run in low precision under autocast, and its rounding could depend on the batch.
    scores_BAK = (query_BAD[..., None, :] * key_BAKD).sum(dim=-1)
    if scale == "sqrt_dim":
        scores_BAK = scores_BAK / query_BAD.shape[-1] ** 0.5
    return functional.softmax(scores_BAK, dim=-1)


class HiddenStateLoss(LayeredTerm):
    """Distance between the states of student layers and combinations of the teacher's states, of [CLS] by default.

    Args:
        mapping: which teacher layers belong to which student layer.
        combine: ``select`` the single layer (PKD), ``concatenate`` and project (CKD), or ``attend`` (ALP).
        distance: ``normalized`` (PKD; ALP-KD Eq. 3), ``mse`` (ALP-KD Eq. 7), ``normalized_mse`` (PKD's code) or
            ``cosine`` (internal representations, Eq. 3).
        over_layers: ``sum`` (ALP-KD) or ``mean`` (PKD's code) over the supervised student layers.
        attention: options of ``attend``; the parameter-free dot product by default. No other combination takes it.
        project: which side ``concatenate`` projects; the teacher by default. No other combination takes it.
        states: whose states are compared: ``cls``, one for each example (all papers), or ``outputs``, those that the
            head reads, such as the first piece of each word. The papers have one output for each example, its [CLS].

    ``diagnostics`` has ``alpha_entropy_<j>`` in nats for each student layer j that attends. A value near 0 means that
    the dot products saturate the softmax, and that one teacher layer has all the weight.
    """

    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        combine: Annotated[
            Literal["select", "concatenate", "attend"],
            Assumption(
                'a separate projection for each student layer; the paper says "a single projection layer"',
                "ALP-KD Eq. 4",
                "concatenate",
            ),
        ],
        distance: Literal["normalized", "mse", "normalized_mse", "cosine"],
        over_layers: Literal["sum", "mean"] = "sum",
        attention: Attention | None = None,
        project: Literal["teacher", "student"] | None = None,
        states: Literal["cls", "outputs"] = "cls",
    ) -> None:
        super().__init__(mapping, over_layers)
        self.states: Literal["cls", "outputs"] = states
        self.mean_over = "example" if states == "cls" else "output"
        for key, value, owner in (("attention", attention, "attend"), ("project", project, "concatenate")):
            if value is not None and combine != owner:
                problem = f"combine={combine} does not use it"
                raise UserError(f".{key}", value if key == "project" else None, problem, f"Only combine: {owner} does.")
        self.attention = attention or Attention()
        self.combine, self.project = combine, project or "teacher"
        self.distance = DISTANCES[distance]
        self.one_to_one = combine == "select"

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        if self.combine == "select" or (self.combine == "attend" and self.attention.type == "dot"):
            name = "combine=select" if self.combine == "select" else "attention=dot"
            reason = f"; {name} compares them without a projection"
            remedy = "Take a student of the teacher's width, or a projection: " + override("method", "ckd")
            self.require_equal("width", student, teacher, reason, remedy)
        match self.combine:
            case "select":
                self.combination: Combination = Select()
            case "concatenate":
                self.combination = Concatenate(self.layers, student.width, teacher.width, self.project)
            case "attend":
                self.combination = Attend(self.layers, student.width, teacher.width, self.attention)

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        if self.states == "outputs":
            return FeatureRequest(states=frozenset(layers))
        return FeatureRequest(cls=frozenset(layers))

    def compared_states(self, features: Features, batch: Batch) -> dict[int, Tensor]:
        """Return the states (R, H) that are compared, by layer: R examples, or outputs of the head."""
        if self.states == "cls":
            return features.cls
        rows = batch.starts if batch.head_tokens is None else batch.head_tokens
        return {layer: states_TH.index_select(0, rows) for layer, states_TH in features.states.items()}

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        sides = (self.compared_states(features, batch) for features in (student, teacher))
        pairs, self.diagnostics = self.combination(self.current_layers, *sides), {}
        for layers, alpha in self.combination.weights:
            self.diagnostics |= dict(zip((f"alpha_entropy_{j}" for j in layers), attention_entropy(alpha), strict=True))
        weights = batch.example_weights if self.states == "cls" else batch.output_weights
        losses = [self.distance(states, targets, weights) for states, targets in pairs]
        return self.reduce_layers(losses[0] if len(losses) == 1 else torch.cat(losses))


class TokenStateLoss(LayeredTerm):
    """Distance between student layers and their teacher layers, over the states of all tokens (TinyBERT, Eq. 8).

    Args:
        mapping: which teacher layer belongs to which student layer.
        distance: ``mse``, mean over tokens and features (TinyBERT), or ``cosine``, 1 minus the cosine (DistilBERT).
        project: whether to train a linear map from the student's to the teacher's width. All layers share one map, as
            in TinyBERT's code; its paper has one symbol for it. Without a map both widths must be equal.
        over_layers: ``sum`` (TinyBERT, Eq. 11 and Algorithm) or ``mean`` over the supervised layers.
    """

    mean_over = "token"
    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        distance: Literal["mse", "cosine"] = "mse",
        project: bool = True,
        over_layers: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__(mapping, over_layers)
        self.distance, self.has_projection = DISTANCES[distance], project

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        self.project = _projection(student, teacher, self.has_projection)

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        return FeatureRequest(states=frozenset(layers))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        pairs = [(student.states[j], teacher.states[k]) for j, (k,) in self.current_layers.items()]
        weights = batch.token_weights
        return self.reduce_layers([self.distance(self.project(state), target, weights) for state, target in pairs])


class EmbeddingLoss(LossTerm):
    """Distance between the embeddings: the inputs of the first layers, after positions and norm (TinyBERT, Eq. 9).

    Args:
        distance, project: as in ``TokenStateLoss``, but with a separate linear map.
    """

    mean_over = "token"
    weighs_examples = True

    def __init__(self, distance: Literal["mse", "cosine"] = "mse", project: bool = True) -> None:
        super().__init__()
        self.distance, self.has_projection = DISTANCES[distance], project

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        assert teacher is not None
        self.project = _projection(student, teacher, self.has_projection)
        self.student_needs = self.teacher_needs = FeatureRequest(states=frozenset({0}))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        return self.distance(self.project(student.states[0]), teacher.states[0], batch.token_weights)


def _projection(student: EncoderShape, teacher: EncoderShape, is_trained: bool) -> nn.Module:
    if is_trained:
        return nn.Linear(student.width, teacher.width)
    LossTerm.require_equal("width", student, teacher, "", "Take a student of the teacher's width.")
    return nn.Identity()


class PooledStateLoss(LayeredTerm):
    """Squared distance of the normalized mean states of layers, after trained linear maps of both sides to one width.

    Args:
        mapping: which teacher layer belongs to which student layer.
        compare: ``layers`` compares each student layer with its teacher layer (RAIL-KD, layer-wise); ``concatenation``
            compares the concatenation of all supervised student layers with that of their teacher layers, after one map
            each.
        width: number of features after the maps; None takes the student's width.
        over_layers: ``sum`` or ``mean`` over the supervised layers; it has no effect on ``concatenation``.
    """

    weighs_examples = True

    def __init__(
        self,
        mapping: LayerMapping,
        compare: Annotated[
            Literal["layers", "concatenation"],
            Assumption("the layer-wise variant; the paper has both", "RAIL-KD", "layers"),
        ] = "layers",
        width: Annotated[
            int | None, Field(ge=1), Assumption("the maps keep the student's width, and have biases", "RAIL-KD", None)
        ] = None,
        over_layers: Annotated[
            Literal["sum", "mean"], Assumption("the losses of layers have equal weights and are added", "RAIL-KD")
        ] = "sum",
    ) -> None:
        super().__init__(mapping, over_layers)
        self.compare, self.width = compare, width

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        width = self.width or student.width
        self.student_maps = nn.ModuleDict({str(j): nn.Linear(student.width, width) for j in self.layers})
        self.teacher_maps = nn.ModuleDict({str(j): nn.Linear(teacher.width, width) for j in self.layers})

    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        return FeatureRequest(states=frozenset(layers))

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        sides = [
            torch.stack([maps[str(j)](batch.means(states)) for j, states in layers.items()])
            for maps, layers in (
                (self.student_maps, {j: student.states[j] for j in self.current_layers}),
                (self.teacher_maps, {j: teacher.states[k] for j, (k,) in self.current_layers.items()}),
            )
        ]
        if self.compare == "concatenation":  # the map of a concatenation is the sum of maps of its parts
            sides = [states_LBW.sum(0, keepdim=True) for states_LBW in sides]
        weights = batch.example_weights
        pairs = zip(*sides, strict=True)
        return self.reduce_layers([normalized_squared_distance(state, target, weights) for state, target in pairs])
