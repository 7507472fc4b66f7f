"""Tasks on labels of words: their examples, head, losses, scores and predictions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from distill_runner.common.assumptions import Assumption
from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.evaluate_metrics import external_metric, is_external
from distill_runner.datasets.metrics import NonFiniteOutputs
from distill_runner.datasets.readers.dataset import BY_CLASS, parse_split
from distill_runner.datasets.readers.table import TableRecord
from distill_runner.datasets.readers.tables import SplitTable, inspect_columns, read_table
from distill_runner.models.config import Head
from distill_runner.tasks.class_names import balanced_weights, check_names, names_as_text
from distill_runner.tasks.split_account import SplitAccount, example_hashes
from distill_runner.tasks.splits import HELD_OUT
from distill_runner.tasks.task import ExamplePredictions, Task
from distill_runner.tasks.tokens.data import (
    ANSWER,
    TEXTS,
    WORDS,
    Offsets,
    Sentences,
    infer_columns,
    read_sentences,
    require_labels,
)
from distill_runner.tasks.tokens.entities import TAG_METRICS, TagScores, first_words, summed_counts
from distill_runner.tasks.tokens.prediction_files import (
    CONLL_SUFFIXES,
    PredictedSpan,
    conll,
    json_lines,
    predicted_spans,
)
from distill_runner.tasks.tokens.schemes import OUTSIDE, Scheme, TagSet, complete_names, recognize, viterbi

if TYPE_CHECKING:
    from distill_runner.datasets.batches import Batch
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.methods.outputs import Outputs
    from distill_runner.tasks.tokens.words import Cutting


class TokensTask(Task):
    """Task on labels of words, such as names of persons and places, or parts of speech.

    Attributes:
        columns: the column of words (lists) or of texts; if empty, it is inferred.
        label: column of tags (lists) or of spans with ``start``, ``end`` and ``label``; null infers it.
        labels: tags in the order of the model's outputs; null reads them from the data.
        scheme: scheme of the tags: ``bio`` (IOB2), ``iob1``, ``bioes`` (also BILOU and BMES) or ``plain``; null
            recognizes it in the training data.
        max_length: maximum number of tokens of a window, including special tokens; longer sentences have several.
        overlap: number of tokens that neighboring windows share.
        pieces: pieces of a word that have its label in training: the ``first``, or ``all``, where other pieces of a B-
            have I-. The prediction for a word is always that of its first piece.
        decoding: ``argmax`` predicts the most probable tag of each word; ``viterbi`` the most probable sequence in
            which every tag may follow the tag before it.
        class_weights: weight of each tag in the loss on gold labels, in the order of ``labels``. ``balanced`` gives
            every tag the same total weight, with a mean of 1 over the words of the training data.
        offsets: unit of the offsets of spans: ``characters`` or ``utf16``, as JavaScript counts; null takes characters
            unless the texts of the spans say otherwise.
        misaligned: what becomes of a span that cuts a word: ``refuse``, ``extend`` it to whole words, or ``drop`` it.
    """

    served_reply = "[[t, labels[n]] for t, n, x in zip(text.tokens, row.argmax(-1), text.special_tokens_mask) if not x]"
    pipeline_tag = "token-classification"
    has_classes = True
    has_words = True
    has_token_outputs = True
    inferred_fields: ClassVar[tuple[str, ...]] = ("scheme",)
    metric_functions = TAG_METRICS
    output_kind = "tags"
    example_fields = frozenset(
        {"columns", "label", "labels", "type", "version", "max_length", "overlap", "pieces", "offsets", "misaligned"}
    )

    type: Literal["tokens"] = "tokens"
    columns: list[str] = Field(default_factory=list, max_length=1)
    label: str | None = None
    labels: list[str] | None = None
    scheme: Scheme | None = None
    max_length: int = Field(128, ge=8)
    overlap: int = Field(32, ge=0)
    pieces: Annotated[
        Literal["first", "all"],
        Assumption("the label of a word is read and trained at its first piece", "BERT, section 5.3"),
    ] = "first"
    decoding: Literal["argmax", "viterbi"] = "argmax"
    class_weights: Literal["balanced"] | list[float] | None = None
    offsets: Offsets | None = None
    misaligned: Literal["refuse", "extend", "drop"] = "refuse"

    _names_are_text = field_validator("labels", mode="before")(names_as_text)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.label is not None and self.label in self.columns:
            problem = f"the column '{self.label}' holds the labels, which no model may read"
            raise UserError("task.columns", format_list(self.columns), problem, "Name the column of words or texts.")
        if self.select_on == HELD_OUT:
            problem = "windows of one sentence would be both trained on and held out"
            remedy = "Take sentences: 'task.train=train[~:90%]' 'task.validation.validation=train[~90%:]'"
            raise UserError("task.select_on", HELD_OUT, problem, remedy)
        for key, split in (("train", self.train), *((f"validation.{name}", s) for name, s in self.validation.items())):
            part = parse_split(split)[1]
            if part is not None and part.order == BY_CLASS:
                problem = "is a slice by class, but a sentence has labels of words"
                raise UserError(f"task.{key}", split, problem, "Use train[~:90%], in random order.")
        if self.labels is None:
            return self
        check_names(self.labels, self.type, self.class_weights)
        tagset = TagSet.from_names(self.labels, self.scheme)
        if tagset.outside is None and tagset.scheme == "plain" and self.metrics[0] != "accuracy":
            problem = f"counts entities, but the labels have no {OUTSIDE}: {format_list(self.labels[:6])}"
            raise UserError("task.metrics", self.metrics[0], problem, "For parts of speech: task.metrics=[accuracy]")
        return self

    @property
    def tagset(self) -> TagSet:
        """The tags of the resolved task."""
        assert self.labels is not None, "resolved"
        return TagSet.from_names(self.labels, self.scheme)

    @property
    def text_column(self) -> str:
        """Column of the words or texts."""
        return self.columns[0]

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if self.label else []

    @property
    def optional_columns(self) -> list[str]:
        return [ANSWER]

    def required_columns(self, split: str) -> dict[str, str]:
        labels = {} if self.is_test(split) or not self.label else {self.label: "label"}
        return dict.fromkeys(self.columns, "columns") | labels

    def resolved(self) -> Self:
        task = super().resolved()
        if not task.columns or task.label is None:
            text, label = infer_columns(inspect_columns(task, task.train), task.columns, task.label)
            task = type(self)(**task.model_dump() | {"columns": [text], "label": label})
        if task.labels is None or task.scheme is None or task.class_weights == "balanced":
            task = task._with_labels_of_data()
        return task

    def _with_labels_of_data(self) -> Self:
        """Return the task with its labels, scheme and weights, as far as they are not set, from the training split."""
        table = read_table(self, self.train)
        sentences = self._sentences(table, self.train)
        if not any(sentence.tags or sentence.spans for sentence in sentences.items):
            raise UserError("task.label", self.label, "the training data have no labels", "Name the column of labels.")
        names = self.labels or self._names_of_data(sentences, table.class_names)
        fields: dict[str, Any] = {"labels": names, "scheme": self.scheme}
        has_spans = any(sentence.tags is None for sentence in sentences.items)
        tagset = TagSet.from_names(names, self.scheme)
        own_names = set(names)
        has_all = not has_spans and all(own_names.issuperset(sentence.tags or ()) for sentence in sentences.items)
        if has_all and (self.scheme is None or self.class_weights == "balanced"):
            tags, bounds = sentences.tag_arrays(names)
            fields["scheme"] = self.scheme or recognize(tagset, tags, first_words(bounds))
            if self.class_weights == "balanced":
                fields["class_weights"] = balanced_weights(tags, names, "word")
        elif self.class_weights == "balanced":
            problem = "needs data with words and tags, of which each word is known before it is tokenized"
            raise UserError("task.class_weights", "balanced", problem, "Name the weights in task.class_weights.")
        fields["scheme"] = fields["scheme"] or tagset.scheme
        return type(self)(**self.model_dump() | fields)

    def _names_of_data(self, sentences: Sentences, class_names: Sequence[str] | None) -> list[str]:
        if class_names is not None:
            return list(class_names)
        spans = {span.label for sentence in sentences.items for span in sentence.spans or ()}
        tags = {tag for sentence in sentences.items for tag in sentence.tags or ()}
        if spans:
            return complete_names([OUTSIDE, *(f"B-{label}" for label in spans)])
        if all(tag.lstrip("-").isdigit() for tag in tags):
            problem = f"are numbers without names: {format_list(sorted(tags, key=int)[:8])}"
            raise UserError("task.labels", None, f"the labels {problem}", "'task.labels=[O,B-PER,I-PER]', in order.")
        return complete_names(tags)

    def _sentences(self, table: Any, split: str) -> Sentences:
        labeled = not self.is_test(split)
        if table.class_names is None and self.labels:
            table = _with_class_names(table, self.label, self.labels)
        return read_sentences(table, self.text_column, self.label or "", split, labeled, self.offsets)

    def examples(self, split: str) -> Any:
        task = self
        if self.is_test(split):  # a file to predict may have texts where the training data have words
            types = inspect_columns(self, split)
            if self.text_column not in types and (usual_names := [name for name in (*WORDS, *TEXTS) if name in types]):
                task = self.model_copy(update={"columns": usual_names[:1]})
        sentences = task._sentences(read_table(task, split), split)
        require_labels(sentences, self.tagset)
        return sentences

    def transfer(self, transfer: "TransferSet") -> Any:
        """Return unlabeled sentences: lists of words, or texts, which the tokenizer divides into words."""
        columns = transfer.inputs()
        if len(columns) != 1:
            raise UserError("transfer", transfer.name, "has two columns, but sentences are single texts", "Name one.")
        table = SplitTable({self.text_column: columns[0]}, None)
        return read_sentences(table, self.text_column, "", transfer.name, labeled=False)

    @property
    def cutting(self) -> "Cutting":
        from distill_runner.tasks.tokens.words import Cutting

        return Cutting(self.max_length, self.overlap, self.pieces, self.misaligned)

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> int:
        from distill_runner.tasks.tokens.words import write_words

        write_words(folder, examples, tokenizer, self.cutting, self.tagset)
        return 0

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.tasks.tokens.words import Words

        return Words(folder)

    def account(self, split: str, examples: Any, tables: Sequence[TableRecord]) -> SplitAccount:
        account = super().account(split, examples, tables)
        account.rows = len(examples)
        account.blank = sum(not sentence.text.strip() for sentence in examples.items)
        if account.label:
            account.label = f"{account.label} ({(self.scheme or '').upper()})"
        account.warnings += examples.remarks
        if examples.is_labeled:
            account.counts, misfits = self._counts(examples)
            account.warnings += misfits
        return account

    def _counts(self, examples: Sentences) -> tuple[dict[str, int], list[str]]:
        """Return the number of entities of each type, or of words with each plain tag, and what does not fit."""
        tagset = self.tagset
        if any(sentence.tags is None for sentence in examples.items):
            labels = [span.label for sentence in examples.items for span in sentence.spans or ()]
            return {name: labels.count(name) for name in tagset.type_names}, []
        tags, bounds = examples.tag_arrays(tagset.names)
        if tagset.outside is None:
            counts = np.bincount(tags, minlength=len(tagset.names))
            return dict(zip(tagset.names, counts.tolist(), strict=True)), []
        is_first = first_words(bounds)
        counts = np.bincount(tagset.entities(tags, is_first)[:, 2], minlength=len(tagset.type_names))
        misfits = tagset.misfits(tags, is_first)
        remarks = []
        if len(misfits):
            word = int(misfits[0])
            number = int(np.searchsorted(bounds, word, side="right")) - 1
            place = examples.items[number].where(word - int(bounds[number]))
            remarks = [
                f"{len(misfits):,} tags of {examples.split} do not fit {tagset.scheme.upper()}, first "
                f"{tagset.names[tags[word]]} in {place}; entities are counted as conlleval counts them"
            ]
        return dict(zip(tagset.type_names, counts.tolist(), strict=True)), remarks

    def hashes(self, examples: Any, folder: Path | None) -> np.ndarray | None:
        return example_hashes(examples.texts)

    @property
    def num_positions(self) -> int:
        return self.max_length

    @property
    def data_summary(self) -> dict[str, Any]:
        return super().data_summary | {"scheme": self.scheme}

    @property
    def head(self) -> Head:
        names = self.tagset.names
        return Head("AutoModelForTokenClassification", names, len(names), None, self.name)

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Classes

        return Classes(None if isinstance(self.class_weights, str) else self.class_weights)

    def has_labels(self, name: str, split: Any) -> bool:
        return split.tags is not None

    # Scores and predictions

    def log_probabilities(self, outputs: np.ndarray, split: Any) -> np.ndarray:
        """Return the log-probabilities of the tags of each word, float64 (N, C).

        Raises:
            NonFiniteOutputs: an output is infinite or not a number.
        """
        from scipy.special import log_softmax

        if not np.isfinite(outputs).all():
            count = int((~np.isfinite(outputs)).any(axis=-1).sum())
            raise NonFiniteOutputs(f"{count} of {len(outputs)} outputs are not finite: the model has diverged")
        logs: np.ndarray = log_softmax(np.asarray(outputs[split.rows], dtype=np.float64), axis=1)
        return logs

    def decode(self, logs: np.ndarray, split: Any) -> np.ndarray:
        """Return the predicted tag of each word, (N,)."""
        tags: np.ndarray = logs.argmax(axis=1)
        return viterbi(logs, np.asarray(split.sentences), self.tagset) if self.decoding == "viterbi" else tags

    def tag_scores(self, outputs: np.ndarray, split: Any) -> TagScores:
        """Return the tags of a split with those predicted from the outputs of a model."""
        predicted = self.decode(self.log_probabilities(outputs, split), split)
        return TagScores(np.asarray(split.tags, dtype=np.int64), predicted, np.asarray(split.sentences), self.tagset)

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        scores = self.tag_scores(outputs, split)
        return {
            name: external_metric(name)(*scores.items()) if is_external(name) else TAG_METRICS[name](scores)
            for name in self.metrics
        }

    def scores_by_class(self, outputs: np.ndarray, split: Any) -> dict[str, dict[str, float]]:
        return self.tag_scores(outputs, split).by_type() if self.tagset.outside is not None else {}

    def prediction_warnings(self, outputs: np.ndarray, split: Any) -> list[str]:
        scores = self.tag_scores(outputs, split)
        if self.tagset.outside is None or len(scores.predicted_entities) or not len(scores.gold_entities):
            return []
        return ["the student predicts no entity"]

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the counts of each sentence for each metric, and the predicted tags; paired tests resample sentences."""
        scores = self.tag_scores(outputs, split)
        own = [name for name in self.metrics if not is_external(name)]
        arrays: dict[str, Any] = {f"counts-{name}": summed_counts(scores, name) for name in own}
        if len(own) < len(self.metrics):
            arrays["items"], arrays["references"] = scores.items()
        np.savez(file, tags=scores.predicted.astype(np.int32), clusters=np.arange(split.num_examples), **arrays)

    def save_pictures(self, folder: Path, epochs: "Iterator[Batch]", outputs: np.ndarray, split: Any) -> None:
        """Save a picture of the errors by type, and a page of sentences with their errors in color."""
        from distill_runner.tasks.tokens.pictures import save_error_page, save_errors

        if self.tagset.outside is None:
            return
        scores = self.tag_scores(outputs, split)
        folder.mkdir(parents=True, exist_ok=True)
        save_errors(folder / "errors.png", scores.errors_by_type())
        name = next(iter(self.validation.values()))
        texts = self.examples(name).texts[0]
        save_error_page(folder / "errors.html", f"{self.name}, {name}", texts, split, scores)

    def example_predictions(self, outputs: np.ndarray, split: Any) -> ExamplePredictions:
        """Return the predictions for the entities of the data, or for its words if no tag is O.

        An entity is predicted correctly if it has the same words and the same type. Its probability is the product of
        the probabilities of its words' tags.
        """
        logs = self.log_probabilities(outputs, split)
        tags, scores = np.asarray(split.tags, dtype=np.int64), self.tag_scores(outputs, split)
        names, probability = self.tagset.names, np.exp(logs[np.arange(len(tags)), tags])
        entities = self._units(scores)
        correct = scores.is_found if self.tagset.outside is not None else scores.predicted == tags

        def text_of(number: int, of_words: np.ndarray) -> str:
            begin, end = entities[number, :2].tolist()
            return " ".join(names[tag] for tag in of_words[begin:end])

        def prediction_text(number: int) -> str:
            begin, end = entities[number, :2].tolist()
            predicted = scores.predicted[begin:end]
            share = float(np.exp(logs[np.arange(begin, end), predicted].sum()))
            return f"{text_of(number, scores.predicted)} ({share:.4f})"

        products = np.multiply.reduceat(np.append(probability, 1.0), entities[:, :2].ravel())[::2]
        return ExamplePredictions(correct, products, prediction_text, lambda number: text_of(number, tags))

    def _units(self, scores: TagScores) -> np.ndarray:
        """Return what models are compared on: the entities of the data, or all of its words; (E, 3)."""
        if self.tagset.outside is not None:
            return scores.gold_entities
        words = np.arange(len(scores.gold))
        return np.stack([words, words + 1, scores.gold], axis=1)

    def example_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        """Return the sentences of entities, each with its entity in brackets; see ``example_predictions``."""
        tags = np.asarray(split.tags, dtype=np.int64)
        scores = TagScores(tags, tags, np.asarray(split.sentences), self.tagset)
        entities, sentences = self._units(scores), self.examples(name).items
        texts = []
        for begin, end, _ in entities[np.asarray(numbers, dtype=np.int64)].tolist():
            text = sentences[int(scores.sentence_of(np.array(begin)))].text
            first, last = int(split.begins[begin]), int(split.ends[end - 1])
            texts.append(f"{text[:first]}[{text[first:last]}]{text[last:]}")
        return texts

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the most probable tag of each output, without decoding."""
        return [self.tagset.names[number] if names else str(number) for number in outputs.argmax(axis=1)]

    def spans(self, outputs: np.ndarray, split: Any) -> list[list[PredictedSpan]]:
        """Return the predicted entities of each sentence."""
        logs = self.log_probabilities(outputs, split)
        tags = self.decode(logs, split)
        return predicted_spans(split, tags, np.exp(logs[np.arange(len(tags)), tags]), self.tagset)

    def prediction_content(self, outputs: np.ndarray, split: Any, examples: Any, suffix: str) -> str:
        """Return words with their tags for a ``.conll`` file, and else ``prediction_file``."""
        if suffix.lower() not in CONLL_SUFFIXES:
            return self.prediction_file(outputs, split, examples)
        tags = self.decode(self.log_probabilities(outputs, split), split)
        return conll(examples.items, split, tags, self.tagset.names)

    def prediction_file(self, outputs: np.ndarray, split: Any, examples: Any) -> str:
        """Return the predicted entities as JSON lines, which can be read as data of this task type again."""
        return json_lines(examples.items, self.spans(outputs, split))


def _with_class_names(table: Any, label: str | None, names: Sequence[str]) -> Any:
    """Return the table, with the task's names for tags that are numbers without names in the data."""
    rows: Mapping[str, list[Any]] = table.columns
    is_number = all(isinstance(tag, int) for row in rows.get(label or "", []) if isinstance(row, list) for tag in row)
    return replace(table, class_names=list(names)) if is_number else table
