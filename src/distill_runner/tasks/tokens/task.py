"""Tasks on labels of words: their examples, head, losses, scores and predictions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from distill_runner.common.errors import UserError, format_typed, override, quantity, short_list
from distill_runner.common.schema import Assumption
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.metrics import require_finite
from distill_runner.datasets.near_copies import sketches
from distill_runner.datasets.readers.content import SplitTable, inspect_columns, read_columns, read_table
from distill_runner.datasets.readers.table import LIST, TableRecord
from distill_runner.models.config import Head
from distill_runner.tasks.class_names import balanced_weights, check_names, names_as_text, weights_in_losses
from distill_runner.tasks.columns import as_int
from distill_runner.tasks.split_account import SplitAccount
from distill_runner.tasks.task import ExamplePredictions, Task
from distill_runner.tasks.tokens.sentences import (
    ANSWER,
    TEXTS,
    WORDS,
    Offsets,
    Sentences,
    infer_columns,
    read_sentences,
    refuse_tree,
)
from distill_runner.tasks.tokens.tags import HAS_LETTER, OUTSIDE, TAG_METRICS, Scheme, TagScores, TagSet, complete_names

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.methods.outputs import Outputs

CONLL_SUFFIXES = (".conll", ".bio", ".iob")
"""Names of files that get a word and its predicted tag in each line instead of JSON lines."""


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
        offsets: unit of the offsets of spans: ``characters``, ``utf16``, as JavaScript counts, or ``newlines``, where
            a line end of Windows is one character; null takes characters unless the texts of the spans say otherwise.
        misaligned: what becomes of a span that cuts a word: ``refuse``, ``extend`` it to whole words, or ``drop`` it.
        teacher_spans: column of another model's spans in the training data, for ``teacher=labels``, each with a
            ``score``, ``probability`` or ``confidence``: that of the span's tags at its words, where the rest is O's.
    """

    served_reply = "[[t, labels[n]] for t, n, x in zip(text.tokens, row.argmax(-1), text.special_tokens_mask) if not x]"
    served_example: ClassVar[str] = "Ada Lovelace met Charles Babbage in London."
    pipeline_tag = "token-classification"
    has_classes = True
    has_words = True
    has_token_outputs = True
    prediction_key: ClassVar[str] = "task.teacher_spans"
    prediction_example: ClassVar[str] = override("task.teacher_spans", "<column of spans with scores>")
    inferred_fields: ClassVar[tuple[str, ...]] = ("scheme",)
    optional_columns: ClassVar[list[str]] = [ANSWER]
    prediction_formats = (".jsonl", *CONLL_SUFFIXES)
    not_held_out = (
        "windows of one sentence would be both trained on and held out",
        "Take sentences: "
        + override(
            "task.select_on", "validation", "task.train", "train[~:90%]", "task.validation.validation", "train[~90%:]"
        ),
    )
    metric_names = TAG_METRICS
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
    teacher_spans: str | None = None

    _names_are_text = field_validator("labels", mode="before")(names_as_text)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.label is not None and self.label in self.columns:
            problem = f"the column '{self.label}' holds the labels, which no model may read"
            raise UserError("task.columns", format_typed(self.columns), problem, "Name the column of words or texts.")
        if self.labels is None:
            return self
        check_names(self.labels, self.type, self.class_weights)
        tagset = TagSet.from_names(self.labels, self.scheme)
        if tagset.outside is None and tagset.scheme == "plain" and self.metrics[0] != "accuracy":
            problem = f"counts entities, but the labels have no {OUTSIDE}: {format_typed(self.labels[:6])}"
            remedy: str = "For parts of speech: " + override("task.metrics", ["accuracy"])
            raise UserError("task.metrics", self.metrics[0], problem, remedy)
        if self.teacher_spans and (tagset.outside is None or self.pieces == "all"):
            remedy = f"Add {OUTSIDE} to task.labels." if tagset.outside is None else override("task.pieces", "first")
            problem = f"needs a tag {OUTSIDE}, and one output a word"
            raise UserError(self.prediction_key, self.teacher_spans, problem, remedy)
        return self

    @property
    def tagset(self) -> TagSet:
        """The tags of the resolved task."""
        assert self.labels is not None, "resolved"
        return TagSet.from_names(self.labels, self.scheme)

    @property
    def label_columns(self) -> list[str]:
        return [self.label] if self.label else []

    @property
    def prediction_columns(self) -> list[str]:
        return [self.teacher_spans] if self.teacher_spans else []

    def _scored_sentences(self, transfer: "TransferSet | None") -> Sentences:
        """Return the training sentences, or those of a transfer set, with the spans of another model.

        Raises:
            UserError: there is no such column, or it has other spans than those of the task with scores.
        """
        (name,), text = self.prediction_columns, self.columns[0]
        further = {name: self.prediction_key}
        if transfer is None:
            table = read_table(self, self.train, further)
        else:
            table = SplitTable(dict(zip((text, name), transfer.inputs(further), strict=True)), None)
        sentences = read_sentences(table, text, name, self.train, True, self.offsets, gold=False)
        sentences.require_labels(self.tagset)
        return sentences

    def training_outputs(self, split: Any, transfer: "TransferSet | None") -> np.ndarray:
        from distill_runner.tasks.tokens.words import span_outputs

        return span_outputs(self._scored_sentences(transfer), split, self.tagset, self.misaligned)

    def scores_line(self, transfer: "TransferSet | None") -> AccountLine:
        sentences = self._scored_sentences(transfer)
        scores = [span.score for sentence in sentences.items for span in sentence.spans or ()]
        text = f"{self.teacher_spans}: {len(scores):,} spans in {quantity(len(sentences), 'text', ',')}"
        text += f", mean score {np.mean(scores):.2f}" if scores else ""
        return AccountLine("scores", "; ".join([text, *sentences.remarks]))

    def required_columns(self, split: str) -> dict[str, str]:
        labels = dict.fromkeys([] if self.is_test(split) else self.label_columns, "label")
        return dict.fromkeys(self.columns, "columns") | labels

    def resolved(self) -> Self:
        task = super().resolved()
        if not task.columns or task.label is None:
            types = inspect_columns(task, task.inferred_from)
            if not task.columns and {"data", "annotations"} <= types.keys():
                refuse_tree(read_columns(task, task.inferred_from, ["data"])["data"])
            text, label = infer_columns(types, task.columns, task.label)
            task = type(self)(**task.model_dump() | {"columns": [text], "label": label})
        if task.labels is None or task.scheme is None or task.class_weights == "balanced":
            task = type(self)(**task.model_dump() | task._fields_of_data())
        return task

    def _fields_of_data(self) -> dict[str, Any]:
        """Return the labels, scheme and weights of the training split, as far as they are not set."""
        table = read_table(self, self.inferred_from)
        sentences = self._sentences(table, self.inferred_from)
        tags = {tag for sentence in sentences.items for tag in sentence.tags or ()}
        types = {span.label for sentence in sentences.items for span in sentence.spans or ()}
        in_data = tags | {f"B-{kind}" for kind in types} | ({OUTSIDE} if types else set())
        names = self.labels or table.class_names or complete_names(sorted(in_data))
        if not tags and not types:
            raise UserError("task.label", self.label, "the training data have no labels", "Name the column of labels.")
        if not self.labels and tags and all(re.fullmatch(r"-?\d*\.?\d+", tag) for tag in tags):
            problem = f"the labels are numbers without names: {format_typed(sorted(tags, key=float)[:8])}"
            remedy = "Name them in order: " + override("task.labels", ["<O>", "<B-PER>", "<I-PER>"])
            remedy += ", or remove this column if it holds scores."
            raise UserError("task.labels", None, problem, remedy)
        tagset, weights = TagSet.from_names(names, self.scheme), self.class_weights
        scheme = self.scheme or tagset.scheme
        has_words = tags <= {*names} and not sentences.has_spans
        if has_words and self.scheme is None:
            scheme = tagset.recognize(*sentences.tag_arrays(tagset))
        if weights == "balanced":
            if not has_words:
                problem = "needs data with words and tags, of which each word is known before it is tokenized"
                raise UserError("task.class_weights", "balanced", problem, "Name the weights in task.class_weights.")
            weights = balanced_weights(sentences.tag_arrays(tagset)[0], names, "word")
        return {"labels": [*names], "scheme": scheme, "class_weights": weights}

    def _sentences(self, table: SplitTable, split: str) -> Sentences:
        tags = [as_int(tag) for row in table.columns.get(self.label or "", ()) if isinstance(row, list) for tag in row]
        if table.class_names is None and self.labels and all(isinstance(tag, int) for tag in tags):
            table = replace(table, class_names=list(self.labels))
        return read_sentences(table, self.columns[0], self.label or "", split, not self.is_test(split), self.offsets)

    def examples(self, split: str) -> Any:
        task = self
        if self.is_test(split):  # a file to predict may have texts where the training data have words
            types = inspect_columns(self, split)
            if self.columns[0] not in types and (usual_names := [name for name in (*WORDS, *TEXTS) if name in types]):
                task = self.model_copy(update={"columns": usual_names[:1]})
        sentences = task._sentences(read_table(task, split), split)
        sentences.require_labels(self.tagset)
        return sentences

    def transfer(self, transfer: "TransferSet") -> Any:
        """Return unlabeled sentences: lists of words, or texts, which the tokenizer divides into words."""
        columns = transfer.inputs()
        if len(columns) != 1:
            raise UserError("transfer", transfer.name, "has two columns, but sentences are single texts", "Name one.")
        name = self.columns[0]
        return read_sentences(SplitTable({name: columns[0]}, None), name, "", transfer.name, labeled=False)

    def compares_tokens(self, transfer: "TransferSet | None") -> bool:
        """Return False if the data have words, of which each has one output, that of its first piece."""
        if self.pieces == "all":
            return True
        if transfer is not None:
            return isinstance(transfer.inputs()[0][0], str)
        return inspect_columns(self, self.train)[self.columns[0]] != LIST

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> int:
        from distill_runner.tasks.tokens.words import write_words

        options = self.max_length, self.overlap, self.pieces, self.misaligned
        write_words(folder, examples, tokenizer, self.tagset, *options)
        return 0

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.tasks.tokens.words import Words

        return Words(folder)

    def account(self, split: str, examples: Any, tables: Sequence[TableRecord]) -> SplitAccount:
        account, tagset = super().account(split, examples, tables), self.tagset
        account.rows = len(examples)
        account.blank = sum(not sentence.text.strip() for sentence in examples.items)
        account.texts, account.unread = [examples.column], [one for one in account.unread if one != examples.column]
        account.label += f" ({tagset.scheme.upper()})" if account.label else ""
        account.warnings += examples.remarks
        if similar := [name for name in tagset.names if tagset.scheme == "plain" and HAS_LETTER.fullmatch(name)]:
            account.warnings.append(f"{short_list(similar)} look like positions, and are read as types of their own")
        if examples.has_spans:
            labels = [span.label for sentence in examples.items for span in sentence.spans or ()]
            account.counts = {name: labels.count(name) for name in tagset.type_names}
        elif examples.is_labeled:
            tags, bounds = examples.tag_arrays(tagset)
            has_entities = tagset.outside is not None
            units = tagset.entities(tags, bounds)[:, 2] if has_entities else tags
            names = tagset.type_names if has_entities else tagset.names
            account.counts = dict(zip(names, np.bincount(units, minlength=len(names)).tolist(), strict=True))
            if len(misfits := tagset.misfits(tags, bounds)):
                word = int(misfits[0])
                number = int(np.searchsorted(bounds, word, side="right")) - 1
                place = examples.items[number].where(word - int(bounds[number]))
                account.warnings.append(
                    f"{len(misfits):,} tags of {split} do not fit {tagset.scheme.upper()}, first "
                    f"{tagset.names[tags[word]]} in {place}; entities are counted as conlleval counts them"
                )
        return account

    def hashes(self, examples: Any, folder: Path | None) -> np.ndarray | None:
        return sketches(examples.texts)

    @property
    def head(self) -> Head:
        return Head("AutoModelForTokenClassification", self.tagset.names, task=self.name)

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.methods.outputs import Classes

        return Classes(weights_in_losses(self.class_weights))

    def has_labels(self, name: str, split: Any) -> bool:
        return split.tags is not None

    # Scores and predictions

    def decode(self, outputs: np.ndarray, split: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the predicted tag of each word, (N,), and the log-probabilities of all tags, float64 (N, C).

        Raises:
            NonFiniteOutputs: an output is infinite or not a number.
        """
        from scipy.special import log_softmax

        require_finite(outputs)
        logs = log_softmax(np.asarray(outputs[split.first_outputs], dtype=np.float64), axis=1)
        return self.tagset.viterbi(logs, split.bounds) if self.decoding == "viterbi" else logs.argmax(axis=1), logs

    def tag_scores(self, outputs: np.ndarray, split: Any) -> TagScores:
        """Return the tags of a split with those predicted from the outputs of a model."""
        tags = np.asarray(split.tags, dtype=np.int64)
        return TagScores(tags, self.decode(outputs, split)[0], np.asarray(split.bounds), self.tagset)

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        scores = self.tag_scores(outputs, split)
        return {name: scores.metric(name) for name in self.metrics}

    def scores_by_class(self, outputs: np.ndarray, split: Any) -> dict[str, dict[str, float]]:
        return self.tag_scores(outputs, split).by_type() if self.tagset.outside is not None else {}

    def label_counts(self, outputs: np.ndarray, split: Any) -> dict[str, np.ndarray]:
        return dict(zip(self.tagset.type_names, self.tag_scores(outputs, split).counts.swapaxes(0, 1), strict=True))

    def prediction_warnings(self, outputs: np.ndarray, split: Any) -> list[str]:
        scores = self.tag_scores(outputs, split)
        has_none = len(scores.gold_entities) > len(scores.predicted_entities) == 0
        return ["the student predicts no entity"] if has_none else []

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the counts of each sentence for each metric, and the predicted tags; paired tests resample sentences."""
        scores = self.tag_scores(outputs, split)
        arrays: dict[str, Any] = {f"counts-{name}": scores.summed_counts(name) for name in self.metrics}
        np.savez(file, tags=scores.predicted.astype(np.int32), clusters=np.arange(split.num_examples), **arrays)

    def example_predictions(self, outputs: np.ndarray, split: Any) -> ExamplePredictions:
        """Return the predictions for the entities of the data, or for its words if no tag is O.

        An entity is predicted correctly if it has the same words and the same type. Its probability is the product of
        the probabilities of its words' tags.
        """
        logs, scores = self.decode(outputs, split)[1], self.tag_scores(outputs, split)
        units = self._units(scores)
        correct = scores.is_found if self.tagset.outside is not None else scores.predicted == scores.gold

        def probability(number: int, tags: np.ndarray) -> float:
            words = np.arange(*units[number, :2])
            return float(np.exp(logs[words, tags[words]].sum()))

        def text(number: int, tags: np.ndarray) -> str:
            return " ".join(self.tagset.names[tag] for tag in tags[slice(*units[number, :2])])

        return ExamplePredictions(
            correct,
            np.array([probability(number, scores.gold) for number in range(len(units))]),
            lambda number: f"{text(number, scores.predicted)} ({probability(number, scores.predicted):.4f})",
            lambda number: text(number, scores.gold),
        )

    def _units(self, scores: TagScores) -> np.ndarray:
        """Return what models are compared on: the entities of the data, or all of its words; (E, 3)."""
        words = np.arange(len(scores.gold))
        entities = scores.gold_entities
        return entities if self.tagset.outside is not None else np.stack([words, words + 1, scores.gold], axis=1)

    def example_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        """Return the sentences of entities, each with its entity in brackets; see ``example_predictions``."""
        tags = np.asarray(split.tags, dtype=np.int64)
        scores = TagScores(tags, tags, np.asarray(split.bounds), self.tagset)
        units, sentences, texts = self._units(scores), self.examples(name).texts[0], []
        for begin, end, _ in units[np.asarray(numbers, dtype=np.int64)].tolist():
            text = sentences[int(scores.sentence_of(begin))]
            first, last = int(split.begins[begin]), int(split.ends[end - 1])
            texts.append(f"{text[:first]}[{text[first:last]}]{text[last:]}")
        return texts

    def prediction_texts(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        """Return the most probable tag of each output, without decoding."""
        return [self.tagset.names[number] if names else str(number) for number in outputs.argmax(axis=1)]

    def prediction_file(
        self, outputs: np.ndarray, split: Any, examples: Any, suffix: str, columns: Mapping[str, list[Any]]
    ) -> str:
        """Return words with their tags for a ``.conll`` file, and else the predicted entities as JSON lines."""
        if suffix not in CONLL_SUFFIXES:
            return self._entity_lines(outputs, split, examples, columns)
        names = [self.tagset.names[tag] for tag in self.decode(outputs, split)[0]]
        blocks = []
        for sentence, first, last in zip(examples.items, split.bounds[:-1], split.bounds[1:], strict=True):
            texts = (sentence.text[split.begins[word] : split.ends[word]].split() for word in range(first, last))
            lines = [f"{'_'.join(text) or '_'}\t{name}\n" for text, name in zip(texts, names[first:last], strict=True)]
            blocks += ["".join(lines) + "\n"] if lines else []  # the format has no sentences without words
        return "".join(blocks)

    def _entity_lines(self, outputs: np.ndarray, split: Any, examples: Any, columns: Mapping[str, list[Any]]) -> str:
        """Return ids and predicted entities as JSON lines, which can be read as data of this task type again."""
        tags, logs = self.decode(outputs, split)
        probability = np.exp(logs[np.arange(len(tags)), tags])
        rows: list[dict[str, Any]] = [{"text": text, "spans": []} for text in examples.texts[0]]
        ids = {name: values for name, values in columns.items() if name in ("id", "idx", "guid", "index")}
        numbers = np.repeat(np.arange(len(rows)), np.diff(split.bounds))
        for begin, end, kind in self.tagset.entities(tags, split.bounds).tolist():
            row, start, stop = rows[numbers[begin]], int(split.begins[begin]), int(split.ends[end - 1])
            mean = round(float(probability[begin:end].mean()), 6)
            span = {"start": start, "end": stop, "label": self.tagset.type_names[kind], "probability": mean}
            if start < stop:  # a blank text has no word
                row["spans"].append(span | {"text": row["text"][start:stop]})
        rows = [{name: values[number] for name, values in ids.items()} | row for number, row in enumerate(rows)]
        return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
