"""A task type as one declaration: what the rest of the program asks of a task of any type.

A type says five things, and no other package asks which type a task has:

1. *Columns*: its options, and which columns of the data are texts, labels or further inputs (``required_columns``,
   ``label_columns``); ``resolved`` reads from the data what the user leaves out.
2. *Collate*: how rows become examples (``examples``), examples arrays (``write``) and arrays batches (``open``).
3. *Head*: which head a model gets (``head``) and which losses its outputs take (``outputs``).
4. *Metrics*: ``metric_names``, and ``score`` where an example has several outputs.
5. *Decoding*: what outputs mean as predictions, for files, comparisons and pictures.

Types of one or two texts with a label are declared in ``text``; ``decoding`` has the meanings of their outputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, override, require_choice
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.evaluate_metrics import external_metric, is_external
from distill_runner.datasets.metrics import compute_metrics
from distill_runner.datasets.readers.table import TableRecord
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.config import Head
from distill_runner.tasks import scores
from distill_runner.tasks.split_account import SplitAccount, account_of_tables
from distill_runner.tasks.task_splits import TaskSplits

if TYPE_CHECKING:
    from distill_runner.datasets.batches import Batch
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.datasets.splits import Split
    from distill_runner.methods.outputs import Outputs
    from distill_runner.models.features import EncoderShape
    from distill_runner.models.sources import ModelSource


ROWS, SPANS, PICTURES, SERVICE, EMPTY = (
    Path(__file__).with_name("templates").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    for name in ("rows", "spans", "pictures", "service", "empty")
)
"""Programs that reply to each text or pair of texts, with the best span of each context, or to each image; a server of
requests for texts; and its check for tokenizers that make no token of an empty text. ``deploy.serving`` fills in their
fields."""


@dataclass(frozen=True)
class ExamplePredictions:
    """Predictions of one model for N examples, to compare models example by example.

    Attributes:
        correct: (N,), whether the prediction is correct.
        label_probability: (N,), the probability that the model gives to the true label or answer.
        prediction_text: function from the number of an example to its prediction as text, with the probability.
        label_text: function from the number of an example to its true label or answer as text.
    """

    correct: np.ndarray
    label_probability: np.ndarray
    prediction_text: Callable[[int], str]
    label_text: Callable[[int], str]


class Task(TaskSplits):
    """Base class of tasks; each type is a subclass, and one entry in ``TASK_TYPES``.

    A subclass must define ``metric_names``, ``example_fields``, ``examples``, ``transfer``, ``write``, ``open``,
    ``head``, ``outputs`` and ``prediction_file``. A head with several outputs per example also needs its own
    ``Split``, which sets ``Batch.head_tokens`` and ``Batch.output_numbers``, and its own ``score``.

    Attributes:
        example_fields: fields on which the stored examples of a split depend, besides the content of the data.
        tokenized: whether the examples are texts, so that models need a tokenizer.
        single_texts: whether a model reads single texts, also where the task's columns are several texts that are
            compared.
        has_classes: whether the outputs of the head are named classes, which the option ``labels`` lists.
        unread_files: why a student cannot predict for a file of examples; empty if it can.
        has_token_outputs: whether the head reads tokens, so that an example has several outputs.
        pipeline_tag: name of the ``transformers`` pipeline, and of the hub's task, that runs a model of this type.
        served_program: program that runs an exported model, with the fields of ``deploy.serving`` and of
            ``served_fields``.
        served_reply: Python expression of the answer to one input in ``ROWS``. It reads ``row``, the outputs for the
            text, ``labels``, the names of the classes, and ``text``, its tokens.
        served_cut: Python expression in the program of whether each of the ``inputs`` loses a part.
        served_call: Python expression that shows the answers to ``inputs``.
        metric_names: names of the metrics; the first one is the default.
        output_kind: what the outputs are to metrics of ``evaluate``; None if these cannot score tasks of this type.
        has_ids: whether ``prediction_file`` names the examples by their ids, as official evaluation scripts read them.
        agreement_name: what ``agreement`` is a share of.
        prediction_formats: endings of the names of files that ``distill-run predict`` writes.
    Raises:
        UserError: a metric is unknown, or ``TaskSplits`` refuses a field.
    """

    # 1. Columns

    example_fields: ClassVar[frozenset[str]]
    tokenized: ClassVar[bool] = True
    single_texts: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False
    unread_files: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_fields_of_other_types(cls, fields: Any) -> Any:
        """Drop null fields that only other task types have, and fill in the default metric for null metrics."""
        if not isinstance(fields, Mapping):
            return fields
        foreign = _all_fields(Task) - cls.model_fields.keys()
        own = {key: value for key, value in fields.items() if value is not None or key not in foreign}
        return own | ({"metrics": [cls.metric_names[0]]} if own.get("metrics", ()) is None else {})

    def with_model(self, sources: Callable[[], Sequence["ModelSource"]]) -> Self:
        """Return the task with the fields that are read from the folder of a model, before ``resolved``.

        Args:
            sources: returns the models that the outputs of a stage go back to, the first teacher first.
        """
        return self

    @property
    def prediction_example(self) -> str:
        """Overrides that name these columns, for messages."""
        example = override("task.probabilities", ["<a column>", "<per class>"]) + " or task.logits; or "
        return example + override("task.answers", ["<column>"])

    @property
    def prediction_columns(self) -> list[str]:
        """Columns of the data with the scores of another model; empty if there are none."""
        return []

    @property
    def prediction_key(self) -> str:
        """Configuration key that names these columns."""
        return "task.probabilities"

    @property
    def has_predictions(self) -> bool:
        """Whether the data say what another model predicts for the training examples."""
        return bool(self.prediction_columns)

    def training_scores(self, transfer: "TransferSet | None") -> scores.Scores:
        """Return what another model predicts for the examples of the training split, or else of a transfer set.

        Raises:
            UserError: the columns do not exist, or do not hold scores.
        """
        return scores.training_scores(self, transfer)

    def training_outputs(self, split: "Split", transfer: "TransferSet | None") -> np.ndarray:
        """Return that in the order of the outputs of the tokenized split, float32 (N, C); rows without a score are in
        neither.
        """
        own = self.training_scores(transfer)
        return own.outputs[own.is_used]

    def prediction_width(self, transfer: "TransferSet | None") -> int:
        """Return the number of outputs of that other model for an example."""
        return self.head.num_labels

    def scores_line(self, transfer: "TransferSet | None") -> AccountLine:
        """Return the line of the account on these scores."""
        return scores.scores_line(self, transfer)

    @property
    def weight_column(self) -> str | None:
        """Column with the weights of training examples in the losses, if there is one."""
        return None

    @property
    def has_train_labels(self) -> bool:
        """Whether the training split has gold labels."""
        return True

    def compares_tokens(self, transfer: "TransferSet | None") -> bool:
        """Return whether the outputs for training examples are those of tokens of one tokenizer, not of the data."""
        return self.has_token_outputs

    @property
    def reads_labels_for_transfer(self) -> bool:
        """Whether the examples of a transfer set depend on the task's own data."""
        return False

    def has_labels(self, name: str, split: "Split") -> bool:
        """Return whether the examples of a test split have labels.

        Args:
            name: the split, as for ``examples``.
            split: the same split, opened.
        Raises:
            UserError: only some of them have labels.
        """
        return split.labels is not None

    # 2. Collate

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """Return the examples of a split before tokenization or decoding.

        Args:
            split: the split as written in ``train``, or in the values of ``validation`` or ``test``.
        Raises:
            UserError: data are missing, damaged or contradictory.
        """

    @abstractmethod
    def transfer(self, transfer: "TransferSet") -> Examples:
        """Return the inputs of a transfer set as examples without labels."""

    @abstractmethod
    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> int:
        """Tokenize or decode ``examples`` and save them in ``folder`` as arrays for ``open``.

        Returns:
            The number of examples that lost a part of their text.
        """

    @abstractmethod
    def open(self, folder: Path, views: int | None = None) -> "Split":
        """Return the examples that ``write`` saved, memory-mapped.

        Args:
            views: number of fixed random crops and flips of each image; None draws new ones in each epoch.
        """

    def examples_in(self, place: Path) -> Any:
        """Return the examples of a folder or file that is no table: its images; None for another one."""
        return None

    def account(self, split: str, examples: Any, tables: Sequence[TableRecord]) -> SplitAccount:
        """Return what was taken from the data of a split.

        Args:
            examples: the examples of the split, as ``examples`` or ``transfer`` returns them.
            tables: what the readers took from the files.
        """
        account = account_of_tables(split, tables, self.columns, self.label_columns)
        read = [*self.prediction_columns, *(["id"] if self.has_ids else [])]
        account.unread = [name for name in account.unread if name not in read]
        labels, names = getattr(examples, "labels", None), self.head.names or ()
        if labels is None:
            return account
        account.rows = len(labels)
        if labels.ndim == 1 and np.issubdtype(labels.dtype, np.floating):
            account.scores = [float(labels.min()), float(labels.mean()), float(labels.max())]
        else:
            counts = (labels > 0).sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=len(names))
            account.counts = dict(zip(names, counts.tolist(), strict=True))
        return account

    def hashes(self, examples: Any, folder: Path | None) -> np.ndarray | None:
        """Return what finds examples that two splits share; None if they are not compared.

        That is a hash of each image (N,), or the sketches of texts (N, C, K) of ``near_copies``.

        Args:
            folder: the folder that ``write`` has filled; None if the examples are not written.
        """
        return None

    def split_settings(self, split: str) -> dict[str, Any]:
        """Return settings besides ``example_fields`` on which the stored examples of this split depend."""
        return {}

    @property
    def input_settings(self) -> dict[str, Any]:
        """Settings besides the saved arrays on which a model's input, and so a cached teacher output, depends."""
        return {}

    def is_endless(self, views: int | None) -> bool:
        """Return whether training examples look different in each epoch, given ``views`` as in ``open``."""
        return False

    @property
    def num_positions(self) -> int:
        """Number of positions that a model needs for the longest example; 0 if examples have no positions."""
        return getattr(self, "max_length", 0)

    # 3. Head

    has_token_outputs: ClassVar[bool] = False
    pipeline_tag: ClassVar[str] = "text-classification"
    served_program: ClassVar[str] = ROWS
    served_reply: ClassVar[str] = ""
    served_cut: ClassVar[str] = "text.overflowing for text in tokenizer.encode_batch(inputs)"
    served_call: ClassVar[str] = "predict({inputs})"

    @property
    @abstractmethod
    def head(self) -> Head:
        """The head of a model for this task."""

    @property
    @abstractmethod
    def outputs(self) -> "Outputs":
        """The meaning of the head's outputs, and the losses on them."""

    def check(self, shape: "EncoderShape") -> None:
        """Check that a model of this ``shape`` can read the examples of the task.

        Raises:
            UserError: the model cannot read them.
        """
        if self.tokenized and shape.reads_images:
            problem = f"a model of type {shape.model_type} reads images, but {self.name} has texts"
            raise UserError(".model", None, problem, "Take a text encoder, or " + override("task", "cifar10"))

    def check_outputs(self, num_outputs: int) -> None:
        """Check that the task can score a model with this number of outputs for an example.

        Raises:
            UserError: it cannot.
        """

    def check_kept(self, source: "ModelSource") -> None:
        """Check that a model that keeps its head was made for the inputs that it gets here.

        Raises:
            UserError: its folder says that they are prepared in another way.
        """

    def save_preprocessor(self, folder: Path) -> None:
        """Save preprocessing files other than the tokenizer's in the folder of a model, such as those for images."""

    @property
    def served_example(self) -> str | tuple[str, str]:
        """A text, or two, that shows what a model answers."""
        text = "The food was good, but the service was slow."
        return (text, "The service could be better.") if len(self.columns) > 1 and not self.single_texts else text

    def served_prompt(self) -> str:
        """Return the text that a program that serves an exported model puts before each text.

        Raises:
            UserError: texts have several prompts, or outputs depend on which tokens are those of the prompt.
        """
        return ""

    def served_fields(self) -> dict[str, Any]:
        """Return the fields of ``served_program`` that depend on the task."""
        prompt = self.served_prompt()
        texts = f"[{prompt!r} + text for text in inputs]" if prompt else "inputs"
        return {"texts": texts, "reply": self.served_reply}

    # 4. Metrics. ``outputs`` are those of a split: (``split.num_outputs``, C), in the order of the split.

    metric_names: ClassVar[tuple[str, ...]]
    output_kind: ClassVar[str | None] = None

    @model_validator(mode="after")
    def _metrics_fit(self) -> Self:
        """Check each metric, and load those of ``evaluate``, before any training."""
        for metric in self.metrics:
            if not is_external(metric):
                require_choice("task.metrics", metric, self.metric_names, f"task.type={self.type} has no such metric")
                continue
            if self.output_kind is None:
                problem = f"tasks of type {self.type} have outputs that no metric of evaluate takes"
                raise UserError("task.metrics", metric, problem, f"Known: {', '.join(self.metric_names)}.")
            num_classes = len(getattr(self, "labels", None) or (0, 1))
            right, wrong = external_metric(metric).probe(self.output_kind, num_classes)
            if metric == self.metrics[0] and right < wrong:
                problem = "is better when it is lower, but the epoch with the highest first metric is selected"
                remedy = override("task.metrics", [self.metric_names[0], metric])
                raise UserError("task.metrics", metric, problem, remedy)
        return self

    def spec(self) -> dict[str, Any]:
        selecting = self.metrics[0]
        code = {"metric_code": external_metric(selecting).fingerprint} if is_external(selecting) else {}
        spec = super().spec() | code
        if {*(spec.get("class_weights") or ())} == {1}:  # as without weights
            del spec["class_weights"]
        return spec

    def score(self, outputs: np.ndarray, split: "Split") -> dict[str, float]:
        """Return the metrics of a model's outputs for a split, in the order of ``metrics``, as fractions.

        Raises:
            NonFiniteOutputs: an output is infinite or not a number.
        """
        return compute_metrics(self.metrics, outputs, np.asarray(split.labels))

    def scores_by_class(self, outputs: np.ndarray, split: "Split") -> dict[str, dict[str, float]]:
        """Return metrics of each class by its name, for the model card; empty if there are none.

        Metrics are fractions; ``support`` is a number of examples.
        """
        return {}

    def label_counts(self, outputs: np.ndarray, split: "Split") -> dict[str, np.ndarray]:
        """Return for each label the true positives, predicted and actual ones by unit, (S, 3); empty without labels."""
        return {}

    # 5. Decoding

    has_ids: ClassVar[bool] = False
    agreement_name: ClassVar[str] = "same prediction"
    prediction_formats: ClassVar[tuple[str, ...]] = (".csv",)

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the prediction for each example as text.

        Args:
            names: use the names of classes; False uses their indices.
        Raises:
            UserError: predictions of this type are no texts.
        """
        raise UserError("task.type", self.type, "predicts no classes", "distill-run predict writes its predictions.")

    def example_predictions(self, outputs: np.ndarray, split: "Split") -> ExamplePredictions:
        """Return the prediction for each example, and whether it is correct.

        Raises:
            UserError: predictions of this type are neither correct nor wrong.
        """
        raise UserError("task.type", self.type, "has predictions that are neither right nor wrong, only close or far")

    def example_texts(self, name: str, split: "Split", numbers: Sequence[int]) -> list[str]:
        """Return examples as readable texts, with the names of the columns if there are several.

        Args:
            name: the split, as for ``examples``.
            split: the same split, opened.
            numbers: indices of the examples in the split.
        """
        columns = self.examples(name).texts
        rows = ([column[number] for column in columns] for number in numbers)
        return [
            row[0] if len(row) == 1 else " ".join(map(": ".join, zip(self.columns, row, strict=True))) for row in rows
        ]

    def prediction_warnings(self, outputs: np.ndarray, split: "Split") -> list[str]:
        """Return what would surprise in the outputs for a split, such as one class predicted for all examples."""
        return []

    def agreement(self, outputs: np.ndarray, reference: np.ndarray, split: "Split") -> float:
        """Return how far two outputs for the examples of a split agree, 0 to 1: the share of equal predictions."""
        return float((np.array(self.prediction_texts(outputs)) == self.prediction_texts(reference)).mean())

    def save_predictions(self, file: Path, outputs: np.ndarray, split: "Split") -> None:
        """Save the arrays that paired tests of two methods read (``report.compare``): outputs and labels by example."""
        np.savez(file, outputs=outputs, labels=np.asarray(split.labels))

    def save_pictures(self, folder: Path, epochs: "Iterator[Batch]", outputs: np.ndarray, split: "Split") -> None:
        """Save PNG files of training examples and of wrong predictions, if such examples can be pictured.

        Args:
            epochs: the same few training examples, as one epoch after the other shows them.
        """

    @abstractmethod
    def prediction_file(
        self, outputs: np.ndarray, split: "Split", examples: Examples, suffix: str, columns: Mapping[str, list[Any]]
    ) -> str | bytes:
        """Return the content of the file that ``distill-run predict`` writes.

        Args:
            examples: the examples that ``split`` was written from.
            suffix: one of ``prediction_formats``, or empty for the default one.
            columns: all columns of the file that was predicted, for formats that repeat some; none of a text file.
        """


def _all_fields(schema: type[Any]) -> set[str]:
    """Return the field names of a class and of all its subclasses."""
    return set(schema.model_fields).union(*map(_all_fields, schema.__subclasses__()))
