"""Tasks of vectors: the model turns each text into a vector, scored by the similarity of pairs of texts."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from distill_runner.common.errors import UserError, format_typed, listed_names, override
from distill_runner.common.files import file_sha256, typed_path
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.metrics import ratio, require_finite
from distill_runner.datasets.readers.content import SplitTable, inspect_columns, read_table
from distill_runner.datasets.readers.dataset import parse_split
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.config import Head, Similarity, VectorOptions
from distill_runner.tasks.columns import is_blank, text_candidates
from distill_runner.tasks.regression import encode_scores
from distill_runner.tasks.scores import Scores, score_table, text_names, transfer_table
from distill_runner.tasks.text import TextTask, example_columns

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.methods.outputs import Outputs
    from distill_runner.models.sources import ModelSource
    from distill_runner.models.vectors import SentenceFolder

VECTOR_REMEDY = "Write them with distill-run predict, from the same texts in the same order."
CHARACTERS = 60
"""Characters of a text in messages."""


class VectorTask(TextTask):
    """Base of tasks whose models make a vector of each text.

    Attributes:
        pooling: how a new head makes a vector of the states: their ``mean``, or that of the first (``cls``) or ``last``
            token. null takes what the model's folder says, else the mean. A kept head always does what its folder says.
        normalize: whether the vectors of a new head have length 1; null as for ``pooling``, else true.
        include_prompt: whether the pooling of a new head reads the tokens of the prompt; null as for ``pooling``, else
            true.
        similarity: how two vectors are compared in scores: by their ``cosine``, ``dot`` product, or negative
            ``euclidean`` or ``manhattan`` distance; null takes what the model's folder says, else the cosine.
        prompt: text that is put before each text; null takes the default prompt of the model's folder, else none.
        train_columns: columns of the training split, if it has others than the pairs that are scored: up to three
            texts. null takes ``columns``.
        teacher_vectors: vectors of the training texts, for ``teacher=labels``: columns of lists, one for each column
            of texts, or one ``.npy`` file (N, C) or (N, columns, C), as ``distill-run predict`` writes them.
        labels: always null, since vectors have no classes.
    """

    served_reply = "row.tolist()"
    pipeline_tag = "sentence-similarity"
    served_call = "[vector[:4] for vector in predict({inputs})]"
    single_texts = True
    weighs_examples = False
    agreement_name = "cosine with torch"
    prediction_formats = (".npy", ".parquet")
    prediction_key: ClassVar[str] = "task.teacher_vectors"
    prediction_example: ClassVar[str] = override("task.teacher_vectors", ["vectors.npy"]) + " or columns of lists"
    example_fields = frozenset({"columns", "train_columns", "label", "type", "max_length", "version", "prompt"})
    inferred_fields: ClassVar[tuple[str, ...]] = ("similarity", "prompt")
    not_held_out = (
        "training texts have no scores, so they cannot be held out to select the epoch",
        "Set " + override("task.select_on", "validation"),
    )

    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool | None = None
    include_prompt: bool | None = None
    similarity: Similarity | None = None
    prompt: str | None = None
    train_columns: list[str] | None = Field(None, min_length=1, max_length=3)
    teacher_vectors: list[str] | None = Field(None, min_length=1, max_length=3)
    labels: None = None
    # No options of this type
    drop_leaks: ClassVar[None] = None  # type: ignore[misc]
    probabilities: ClassVar[None] = None  # type: ignore[misc]
    logits: ClassVar[None] = None  # type: ignore[misc]
    answers: ClassVar[None] = None  # type: ignore[misc]

    @property
    def has_predictions(self) -> bool:
        return bool(self.teacher_vectors)

    @property
    def prediction_columns(self) -> list[str]:
        return [] if self._vector_file else self.teacher_vectors or []

    @property
    def _vector_file(self) -> Path | None:
        first = (self.teacher_vectors or [""])[0]
        return typed_path(first) if first.endswith(".npy") else None

    def spec(self) -> dict[str, Any]:
        file = self._vector_file
        return super().spec() | ({"teacher_vectors": f"sha256:{file_sha256(file)}"} if file and file.is_file() else {})

    def training_scores(self, transfer: "TransferSet | None") -> Scores:
        if transfer is None:
            table, texts = score_table(self, self.train), self.examples(self.train).texts
        else:
            table = transfer_table(self, transfer)
            texts = [table.columns[name] for name in text_names(self, table)]
        columns = [table.columns[name] for name in self.prediction_columns]
        outputs = read_vectors(self.prediction_key, self._vector_file or columns, len(texts) * len(texts[0]))
        return Scores(outputs, np.ones(len(outputs), dtype=bool), [])

    def prediction_width(self, transfer: "TransferSet | None") -> int:
        return self.training_scores(transfer).outputs.shape[1]

    def scores_line(self, transfer: "TransferSet | None") -> AccountLine:
        count, width = self.training_scores(transfer).outputs.shape
        return AccountLine("scores", f"{format_typed(self.teacher_vectors or [])}: {count:,} vectors of width {width}")

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts by name, as a folder of sentence-transformers lists them; ``text`` is the default one."""
        return {"text": self.prompt or ""}

    def with_model(self, sources: Callable[[], Sequence["ModelSource"]]) -> Self:
        from distill_runner.models.vectors import source_folder

        folder = next(filter(None, map(source_folder, sources())), None)
        values = self._values_of(folder) | {"similarity": folder.similarity if folder else "cosine"}
        return self.model_copy(update={name: value for name, value in values.items() if getattr(self, name) is None})

    def _values_of(self, folder: "SentenceFolder | None") -> dict[str, str]:
        """Return the fields of prompts as ``encode`` of sentence-transformers takes them from a folder."""
        return {"prompt": folder.prompts.get(folder.default_prompt or "", "") if folder else ""}

    def served_prompt(self) -> str:
        if any(self.prompts.values()) and self.include_prompt is False and self.pooling != "last":
            problem = "an exported model cannot tell the tokens of the prompt from the text"
            raise UserError("task.include_prompt", False, problem, "Set " + override("task.include_prompt", True) + ".")
        return self.prompt or ""

    @property
    def head(self) -> Head:
        texts = self.prompts, self.max_length, self.similarity or "cosine"
        return Head("AutoModel", vectors=VectorOptions(self.pooling, self.normalize, self.include_prompt, *texts))

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.tasks.vectors.texts import Vectors

        return Vectors()

    def text_prompts(self, examples: Examples) -> list[str]:
        """Return the prompt of each text, row by row; fewer are repeated."""
        return [self.prompt or ""]

    def write(self, folder: Path, examples: Examples, tokenizer: Any) -> int:
        from distill_runner.tasks.vectors.texts import write_texts

        return write_texts(folder, examples, tokenizer, self.max_length, self.text_prompts(examples))

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.tasks.vectors.texts import TextRows

        return TextRows(folder)

    def leak_warnings(self, examples: Examples) -> list[str]:
        return []

    def agreement(self, outputs: np.ndarray, reference: np.ndarray, split: Any) -> float:
        """Return the mean cosine of vectors of the same texts."""
        return float(pair_similarities(outputs, reference, "cosine").mean())

    def prediction_file(
        self, outputs: np.ndarray, split: Any, examples: Examples, suffix: str, columns: Mapping[str, list[Any]]
    ) -> bytes:
        """Return the vectors as a file: ``.npy``, or ``.parquet`` with one column of lists for each column of texts.

        The array is float32, (N, C); with several columns of texts it is (N, columns, C).
        """
        rows = outputs.astype(np.float32).reshape(len(split), split.per_row, -1)
        stream = io.BytesIO()
        if suffix in (".npy", ""):
            np.save(stream, rows[:, 0] if split.per_row == 1 else rows)
        else:
            import pandas

            names = self.columns if len(self.columns) == split.per_row else [f"text{j}" for j in range(split.per_row)]
            pandas.DataFrame({name: [*rows[:, j]] for j, name in enumerate(names)}).to_parquet(stream)
        return stream.getvalue()


def read_vectors(key: str, source: Path | Sequence[Sequence[Any]], count: int) -> np.ndarray:
    """Return the vectors (N, C), float32, in a ``.npy`` file or in columns of lists, of ``count`` texts.

    Raises:
        UserError: they cannot be read, are those of other texts, or have numbers that are not finite.
    """
    name = str(source) if isinstance(source, Path) else None
    try:
        values = np.load(source) if isinstance(source, Path) else np.stack([np.array(own, "f4") for own in source], 1)
        vectors = np.asarray(values, dtype=np.float32).reshape(-1, values.shape[-1])
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise UserError(key, name, f"cannot be read as vectors of one length: {error}", VECTOR_REMEDY) from error
    if len(vectors) != count or not np.isfinite(vectors).all():
        finite = np.isfinite(vectors).all(axis=1).sum()
        problem = f"has {finite:,} vectors of finite numbers, but there are {count:,} texts"
        raise UserError(key, name, problem, VECTOR_REMEDY)
    return vectors


def pair_similarities(first_NC: np.ndarray, second_NC: np.ndarray, similarity: Similarity) -> np.ndarray:
    """Return the similarity (N,) of each row of two arrays, in float64; the cosine is 0 where a vector is 0.

    Raises:
        NonFiniteOutputs: a number is infinite or not a number.
    """
    first, second = (np.asarray(array, dtype=np.float64) for array in (first_NC, second_NC))
    require_finite(np.hstack([first, second]))
    if similarity in ("euclidean", "manhattan"):
        return np.asarray(-np.linalg.norm(first - second, ord=1 if similarity == "manhattan" else 2, axis=-1))
    products = np.asarray((first * second).sum(axis=-1))
    if similarity == "dot":
        return products
    return ratio(products, np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1))


class EmbeddingsTask(VectorTask):
    """Vectors of texts, scored on pairs of texts by the correlation of their cosine with the score of a person.

    Training examples are texts: a transfer set, or the training split. The score of training rows is read only if the
    method learns from it (``margin``).
    """

    metric_names = ("spearman", "pearson")

    type: Literal["embeddings"] = "embeddings"

    @property
    def inferred_from(self) -> str:
        return next(iter({**self.validation, **self.test}.values()))

    def resolved(self) -> Self:
        task = super().resolved()
        if self.columns or task.train_columns or not self.train:
            return task
        types = inspect_columns(task, task.train)
        if set(task.columns) <= types.keys():
            return task
        texts = text_candidates(types, task.label_columns)
        if len(texts) != 1:
            problem = f"cannot be inferred: the training data have {listed_names(list(types))}"
            raise UserError("task.train_columns", None, problem, override("task.train_columns", ["<text>"]))
        return type(task)(**task.model_dump() | {"train_columns": texts})

    def _columns(self, split: str) -> list[str]:
        if self.train_columns and self._is_training(split):
            return self.train_columns
        if len(self.columns) == 1 and split in self.validation.values():
            problem = "has one column, but pairs of texts are scored"
            raise UserError("task.columns", self.columns, problem, override("task.columns", ["<text>", "<other>"]))
        return self.columns

    def _is_training(self, split: str) -> bool:
        name, of_train = (parse_split(self.locate(one)[1])[0] for one in (split, self.train))
        return name == of_train and split not in (*self.validation.values(), *self.test.values())

    def required_columns(self, split: str) -> dict[str, str]:
        """Return the required columns with their fields; a training or test split does not need the score.

        The name of a split stands for all of its parts: one may be trained on, and another evaluated.
        """
        own = [part for part in sorted(self.splits) if self.locate(part)[0] is self and parse_split(part)[0] == split]
        required = dict[str, str]()
        for part in own or [split]:
            is_training = self._is_training(part)
            field = "train_columns" if self.train_columns and is_training else "columns"
            required |= dict.fromkeys(self._columns(part), field)
            required |= {} if is_training or self.is_test(part) else {self.label: "label"}
        return required

    def examples(self, split: str) -> Examples:
        table = read_table(self, split)
        return Examples(example_columns(table, self._columns(split), split), self.encoded_labels(table, split))

    def account(self, split: str, examples: Examples, tables: Sequence[Any]) -> Any:
        account, own = super().account(split, examples, tables), self._columns(split)
        account.texts, account.unread = own, [name for name in account.unread if name not in own]
        return account

    def encoded_labels(self, table: SplitTable, split: str) -> np.ndarray | None:
        values = self.label_values(table)
        is_unlabeled = self._is_training(split) and (not values or any(map(is_blank, values)))
        return None if is_unlabeled else super().encoded_labels(table, split)

    def encode(self, values: list[Any], table: SplitTable, split: str) -> np.ndarray:
        return encode_scores(values, self.label, split)

    # Scores

    def similarities(self, outputs: np.ndarray) -> np.ndarray:
        """Return the similarity (N, 1) of the two texts of each row."""
        return pair_similarities(outputs[0::2], outputs[1::2], self.similarity or "cosine")[:, None]

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        return super().score(self.similarities(outputs), split)

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the cosine of each pair and its score, as for a regression."""
        super().save_predictions(file, self.similarities(outputs), split)

    def prediction_warnings(self, outputs: np.ndarray, split: Any) -> list[str]:
        spread = float(np.std(self.similarities(outputs)))
        return [] if spread > 1e-3 else ["all pairs have nearly the same cosine: the vectors have collapsed"]

    def example_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        columns = self.examples(name).texts
        return [" | ".join(column[number][:CHARACTERS] for column in columns) for number in numbers]
