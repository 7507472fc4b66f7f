"""Extension point for methods: a method is a weighted sum of loss terms, and the training loop knows nothing else.

A loss term declares what it reads of the models (``FeatureRequest``), builds its trained parameters in ``bind``, and
returns a scalar in ``forward``. A new method is a new loss term in a module of this package, or only a new combination
of loss terms in ``conf/method/``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from distill_runner.common.errors import UserError, error_context, override
from distill_runner.datasets.batches import Batch, Unit
from distill_runner.methods.layer_mapping import LayerMapping, one_to_one
from distill_runner.methods.outputs import Outputs
from distill_runner.models.features import EncoderShape, FeatureRequest, Features

DIFFERENT_SIZES = {
    "width": "its states have {} features, the teacher's {}",
    "num_heads": "it has {} attention heads, the teacher {}",
}


@dataclass(frozen=True)
class Progress:
    """Current epoch and step of training, for schedules of layers or temperatures.

    ``epoch`` counts from 0; ``step`` counts optimizer steps from 0 over all epochs.
    """

    epoch: int
    step: int
    num_epochs: int
    num_steps: int


def times(factor: float | Tensor, value: Tensor) -> Tensor:
    """Return the product; a factor of 1, as with one batch in an update, starts no kernel."""
    if isinstance(factor, Tensor):
        return factor.to(value) * value
    return value if factor == 1 else factor * value


class LossTerm(nn.Module, ABC):
    """One loss term of a method. Subclasses set their needs in ``bind``; the optimizer also trains their parameters.

    Attributes:
        version: number to raise when the meaning of the term changes, so that stored results are not reused for it.
        reads_teacher: whether the term needs a teacher.
        reads_labels: names of the batch's own labels that the term reads: ``labels``, ``is_next``.
        weighs_examples: whether the term reads the weights of the examples (``Batch.example_weights``).
        compares_examples: whether the loss of an example depends on the others of its batch. Parts of an update, of
            ``optim.accumulation`` or several processes, then give another loss than the whole.
        ends_late: whether the term has its final form in the last epochs only, so that training must not end early.
        mean_over: unit that the term is a mean over. It decides how much each batch of an update counts, so that the
            batches add up to the mean over the update.
        student_needs, teacher_needs: features that ``forward`` reads of each model.
        fits_teacher: whether ``fit`` must see the teacher's features of all training examples before the first update.
        diagnostics: scalars of the last forward, logged with the losses.
    """

    version: ClassVar[int] = 1
    reads_teacher: ClassVar[bool] = True
    reads_labels: ClassVar[frozenset[str]] = frozenset()
    weighs_examples: ClassVar[bool] = False
    compares_examples: ClassVar[bool] = False
    ends_late: ClassVar[bool] = False
    mean_over: Unit = "example"
    fits_teacher: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.student_needs = FeatureRequest()
        self.teacher_needs = FeatureRequest()
        self.diagnostics: dict[str, Tensor] = {}

    @classmethod
    def ignored_arguments(cls, outputs: Outputs) -> frozenset[str]:
        """Return the arguments that have no effect for these outputs and so do not distinguish runs."""
        return frozenset()

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        """Set ``student_needs`` and ``teacher_needs``, and build projections, for this pair of models.

        It may be called on the meta device, where parameters have no values, to find out what the term reads.

        Args:
            student, teacher: shapes of the two models; ``teacher`` is None in a stage without a teacher.
            outputs: meaning of the heads' outputs, with the losses on them.
        Raises:
            UserError: the term does not work for this pair of models. A key that begins with a dot is relative to the
                configuration of the term.
        """

    def check_epochs(self, num_epochs: int) -> None:
        """Tell the user if a term that changes from epoch to epoch does not come to its end in ``num_epochs``."""

    def begin_epoch(self, progress: Progress) -> None:
        """Prepare for the updates of an epoch, as ``Method.begin_epoch``; here a term can change its needs.

        They must be among those of ``bind``, so that targets can be cached before the first epoch.
        """

    def fit(self, teacher: Iterable[Features]) -> None:
        """Compute statistics of the teacher's features, such as principal components, into buffers of the term.

        Args:
            teacher: the teacher's features of all training examples, part by part, each example once.
        """

    def graph_key(self, progress: Progress) -> Hashable:
        """Return what ``forward`` depends on besides its arguments and parameters, such as the layers of this epoch.

        A recorded update is replayed only with the same key. A term that changes in ``begin_epoch`` has one an epoch.
        """
        return None if type(self).begin_epoch is LossTerm.begin_epoch else progress.epoch

    @abstractmethod
    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> Tensor:
        """Return the unweighted term: a scalar, the mean over the batch's units ``mean_over``."""

    @staticmethod
    def require_equal(
        size: Literal["width", "num_heads"], student: EncoderShape, teacher: EncoderShape, reason: str, remedy: str
    ) -> None:
        """Check that both models have the same width, or as many attention heads.

        Raises:
            UserError: they differ; ``reason`` says why this matters.
        """
        sizes = getattr(student, size), getattr(teacher, size)
        if sizes[0] != sizes[1]:
            raise UserError("student", None, DIFFERENT_SIZES[size].format(*sizes) + reason, remedy)


class LayeredTerm(LossTerm):
    """Sum or mean over student layers, each compared with the teacher layers that a mapping assigns to it.

    A schedule can restrict the term to some of the student layers. Subclasses build their trained parameters in
    ``build``, name the features that they compare in ``layer_needs``, and compare the layers of ``current_layers`` in
    ``forward``.

    Args:
        mapping: which teacher layers belong to which student layer.
        over_layers: ``sum`` or ``mean`` over the current layers.

    Attributes:
        one_to_one: whether the term compares each student layer with a single teacher layer.
        layers: teacher layers of each student layer that can be supervised, in this epoch; empty before ``bind``.
        current_layers: entries of ``layers`` that are compared in the current epoch.
    """

    one_to_one: bool = True

    def __init__(self, mapping: LayerMapping, over_layers: Literal["sum", "mean"]) -> None:
        super().__init__()
        self.mapping, self.over_layers = mapping, over_layers
        self.layers: dict[int, list[int]] = {}
        self.current_layers: dict[int, list[int]] = {}

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> None:
        if teacher is None:
            remedy = "A method without a teacher: " + override("method", "nkd")
            raise UserError("teacher", None, "an intermediate loss needs a teacher", remedy)
        for side, shape in (("student", student), ("teacher", teacher)):
            shape.require(self.layer_needs({1}), side)
        layers = self.mapping.teacher_layers(student.num_layers, teacher.num_layers)
        if not any(layers):
            remedy = "The last layer is left out by default. To include it: " + override("mapping.supervise_last", True)
            raise UserError(".mapping", layers, f"supervises no layer of a {student.num_layers}-layer student", remedy)
        if self.one_to_one:
            one_to_one(layers)
        self.layers = {j: entry for j, entry in enumerate(layers, start=1) if entry}
        self.depths = student.num_layers, teacher.num_layers
        self.build(student, teacher)
        self.supervise(self.layers)
        if self.mapping.every_epoch:
            self.teacher_needs = self.layer_needs(range(1, teacher.num_layers + 1))

    def begin_epoch(self, progress: Progress) -> None:
        """Take the teacher layers of this epoch; all but mappings with ``every_epoch`` keep theirs."""
        layers = self.mapping.teacher_layers(*self.depths, progress.epoch)
        self.layers = {j: layers[j - 1] for j in self.layers}
        self.supervise(self.layers)

    def graph_key(self, progress: Progress) -> Hashable:
        return tuple((j, *entry) for j, entry in self.current_layers.items())

    def build(self, student: EncoderShape, teacher: EncoderShape) -> None:
        """Build the parameters for the comparison of ``layers``, and check that the two models fit.

        Raises:
            UserError: the term does not work for this pair of models.
        """

    @abstractmethod
    def layer_needs(self, layers: Collection[int]) -> FeatureRequest:
        """Return the features that the term compares, for these layers of a model; also called before ``build``."""

    def supervise(self, layers: Collection[int]) -> None:
        """Compare only these student layers from now on, and update the needs accordingly."""
        self.current_layers = {j: entry for j, entry in self.layers.items() if j in layers}
        self.student_needs = self.layer_needs(self.current_layers)
        self.teacher_needs = self.layer_needs(set(chain.from_iterable(self.current_layers.values())))

    def reduce_layers(self, values: Sequence[Tensor] | Tensor) -> Tensor:
        """Reduce the values of the current layers, also in one tensor, to their sum or mean."""
        losses = values if isinstance(values, Tensor) else torch.stack([*values])
        return losses.sum() if self.over_layers == "sum" else losses.mean()


class Method(nn.Module):
    """Weighted sum of named loss terms. A term of weight 0 is dropped, and its features are not computed.

    ``student_needs`` and ``teacher_needs`` are the features that the next ``forward`` reads of each model.

    Args:
        terms: name -> term, in the order of logging.
        weights: name -> weight, not negative.
    """

    def __init__(self, terms: Mapping[str, LossTerm], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.weights = {name: float(weight) for name, weight in weights.items() if weight}
        self.terms = nn.ModuleDict({name: terms[name] for name in self.weights})

    def bind(self, student: EncoderShape, teacher: EncoderShape | None, outputs: Outputs) -> "Method":
        """Bind every term, and request all features that the terms read of the student and of the teacher.

        Raises:
            UserError: a term does not work for this pair of models.
        """
        for name, term in self.named_terms().items():
            with error_context(f".method.terms.{name}"):
                term.bind(student, teacher, outputs)
                student.require(term.student_needs, "student")
                if teacher is not None:
                    teacher.require(term.teacher_needs, "teacher")
        self.student_needs, self.teacher_needs = self.combined_needs(self.named_terms().values())
        return self

    def named_terms(self) -> dict[str, LossTerm]:
        """Return the terms by name, in the order of logging."""
        return {name: term for name, term in self.terms.items() if isinstance(term, LossTerm)}

    def current_terms(self) -> dict[str, LossTerm]:
        """Return the terms that the next ``forward`` computes, by name."""
        return self.named_terms()

    def supervised_layers(self) -> list[int]:
        """Return the student layers that any term can supervise, in ascending order."""
        layered = [term for term in self.named_terms().values() if isinstance(term, LayeredTerm)]
        return sorted({j for term in layered for j in term.layers})

    def fit(self, teacher: Callable[[], Iterable[Features]]) -> None:
        """Let each term that needs it see the teacher's features of all training examples, before the first update.

        Args:
            teacher: function that begins to compute the features.
        """
        for term in self.named_terms().values():
            if term.fits_teacher:
                term.fit(teacher())

    def begin_epoch(self, progress: Progress) -> None:
        """Prepare for the updates of an epoch; called again when training resumes within the epoch.

        A method that changes during training changes here: the terms that ``current_terms`` returns, and the
        features that the next ``forward`` reads.
        """
        for term in self.named_terms().values():
            term.begin_epoch(progress)
        self.student_needs, self.teacher_needs = self.combined_needs(self.current_terms().values())

    def graph_key(self, progress: Progress) -> Hashable:
        """Return what an update depends on besides its inputs and parameters: features, terms, the keys of these."""
        keys = ((name, term.graph_key(progress)) for name, term in self.current_terms().items())
        return self.student_needs, self.teacher_needs, *keys

    def end_update(self, means: Mapping[str, Tensor], num_examples: int) -> None:
        """Receive the values of the terms after every update, for methods that keep statistics of them.

        ``forward`` is not the place for statistics: with gradient accumulation or several processes it sees only a part
        of an update.

        Args:
            means: unweighted terms by name, as means over the whole update.
            num_examples: number of examples of the update.
        """

    @staticmethod
    def combined_needs(terms: Iterable[LossTerm]) -> tuple[FeatureRequest, FeatureRequest]:
        """Return all features that these terms read of the student and of the teacher."""
        student, teacher = FeatureRequest(), FeatureRequest()
        for term in terms:
            student, teacher = student | term.student_needs, teacher | term.teacher_needs
        return student, teacher

    def forward(self, student: Features, teacher: Features, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Return this batch's contribution to each unweighted term, by name.

        The contributions of all batches of an update add up to the mean over the update.
        """
        losses = dict[str, Tensor]()
        for name, term in self.current_terms().items():
            loss = term(student, teacher, batch, progress)
            # Autograd's nodes would stay until the next update, and those of another stream refuse to be recorded.
            term.diagnostics = {key: value.detach() for key, value in term.diagnostics.items()}
            if not torch.is_tensor(loss) or loss.dim():
                remedy = "Return a mean over the examples, such as losses.mean()."
                raise UserError(f".method.terms.{name}", None, "forward does not return one number", remedy)
            losses[name] = times(batch.shares.get(term.mean_over, 1.0), loss)
        return losses

    def weighted_losses(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weighted losses by name. Their sum is the training loss, so the logged losses add up to it."""
        return {name: times(self.weights[name], mean) for name, mean in means.items()}

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the detached scalars that the current terms log with their losses, by ``<term>/<name>``."""
        terms = self.current_terms().items()
        return {f"{name}/{key}": value for name, term in terms for key, value in term.diagnostics.items()}
