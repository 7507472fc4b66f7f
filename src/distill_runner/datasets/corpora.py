"""Corpora and transfer sets of unlabeled text: mixtures of named parts, each read from a separate dataset."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, field_validator, model_validator

from distill_runner.common.errors import UserError, format_typed, override
from distill_runner.common.schema import Assumption, Schema
from distill_runner.datasets.readers.content import data_fingerprint, read_rows, read_table, require_own_rows
from distill_runner.datasets.readers.dataset import Dataset, splits_overlap
from distill_runner.datasets.readers.table import is_missing, text_of
from distill_runner.datasets.tokenization import Examples

LOCATION_FIELDS = {"dataset", "config", "revision", "encoding"}
"""Fields that locate the data and say how files are read; a part's spec contains a hash of the content instead."""
ORDER_SEED = 0
"""Seed of the order in which a transfer set is cut to its size; smaller sets are thus part of larger ones."""
SplitName = Literal["train", "validation"]


class CorpusPart(Dataset):
    """Text from one dataset.

    Each row is a document unless ``document_column``, ``document_start`` or ``rows_per_document`` is set. Each of these
    joins consecutive rows into documents; the first one that is set applies.

    Attributes:
        train: training split, or a slice of it such as ``train[:10%]``; ``*`` takes every file of a folder, and another
            pattern those that it matches.
        validation: validation split; ``null`` holds out training documents instead (``corpus.hold_out``).
        document_column: consecutive rows with the same value in this column form a document (chapters of one novel).
        document_start: regular expression that matches the beginning of a document's first row (WikiText's headings).
        rows_per_document: number of rows per document, for data that has lost the borders of documents, such as
            BookCorpus with one sentence per row.
        limit: maximum number of documents taken from each split, or of rows in a transfer set; ``null`` takes all.
    """

    lines_are_texts: ClassVar[bool] = False

    _key: str = PrivateAttr("parts")
    train: str = "train"
    validation: str | None = None
    document_column: str | None = None
    document_start: str | None = None
    rows_per_document: int = Field(1, ge=1)
    limit: int | None = Field(None, ge=1)

    @field_validator("document_start")
    @classmethod
    def _is_valid_expression(cls, expression: str | None) -> str | None:
        try:
            re.compile(expression or "")
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from error
        return expression

    @model_validator(mode="after")
    def _validates_on_other_rows(self) -> Self:
        if self.validation is not None and splits_overlap(self.train, self.validation):
            problem = f"has rows of the training split {self.train}"
            remedy = "Give two parts, as train[:90%] and train[90%:], or null, which holds documents out."
            raise UserError(f"{self.key}.validation", self.validation, problem, remedy)
        return self

    @property
    def key(self) -> str:
        return self._key

    @property
    def splits(self) -> set[str]:
        return {self.train} | ({self.validation} if self.validation else set())

    def split_key(self, split: str) -> str:
        return f"{self.key}.{'validation' if split == self.validation != self.train else 'train'}"

    def required_columns(self, split: str) -> dict[str, str]:
        column = {self.document_column: "document_column"} if self.document_column else {}
        return column | dict.fromkeys(self.columns, "columns")

    def spec(self) -> dict[str, Any]:
        """Return all that determines the text, independent of where the data is stored."""
        require_own_rows(self)
        return {**self.model_dump(exclude=LOCATION_FIELDS), "content": data_fingerprint(self)}

    def documents(self, split: str, stream: bool = False) -> Iterator[list[str]]:
        """Yield each document as the list of its texts, in order; empty texts and empty documents are left out.

        Raises:
            UserError: the split cannot be read, or has no text.
        """
        return islice(self._documents(split, stream), self.limit)

    def _documents(self, split: str, stream: bool) -> Iterator[list[str]]:
        document, previous_name, has_text = list[str](), None, False
        for number, row in enumerate(read_rows(self, split, download=not stream)):
            texts = []
            for column in self.columns:
                try:
                    texts.append("" if is_missing(row.get(column)) else text_of(row[column]).strip())
                except ValueError as error:
                    problem = f"row {number} of split '{split}' holds {error}"
                    raise UserError(f"{self.key}.columns", column, problem, "Name columns of texts.") from error
            if self.document_column:
                name = row.get(self.document_column)
                is_start, previous_name = name != previous_name, name
            elif self.document_start:
                is_start = re.match(self.document_start, texts[0]) is not None
            else:
                is_start = number % self.rows_per_document == 0
            if document and is_start:
                yield document
                document = []
            document.extend(filter(None, texts))
            has_text = has_text or bool(document)
        if document:
            yield document
        if not has_text:
            raise UserError(self.split_key(split), split, f"no text in the column {', '.join(self.columns)}")


class TransferPart(CorpusPart):
    """A source of the inputs of a transfer set, whose files of plain text hold a text in each line."""

    lines_are_texts: ClassVar[bool] = True


class Mixture(Schema):
    """Text from several named parts, concatenated in the order given.

    Attributes:
        name: name for display only.
        version: version number, raised when the same configuration comes to mean other text.
        parts: the parts by name, so that the command line can override one value of one part.
    """

    group: ClassVar[str]
    """Configuration group, used in messages."""

    name: str
    version: int = 1
    parts: Mapping[str, CorpusPart] = Field(min_length=1)

    @model_validator(mode="after")
    def _set_part_keys(self) -> Self:
        for name, part in self.parts.items():
            part._key = f"{self.group}.parts.{name}"
        return self

    def spec(self) -> dict[str, Any]:
        """Return all that determines the text; the names and the location of the data are left out."""
        return {**self.model_dump(exclude={"name", "parts"}), "parts": [part.spec() for part in self.parts.values()]}


class Corpus(Mixture):
    """Plain text, and how examples are made from it.

    Attributes:
        max_length: maximum number of tokens of an example, special tokens included.
        vocab_size: number of entries of a WordPiece vocabulary trained on the corpus; needed only for
            ``model.tokenizer: corpus``.
        examples: how examples are made. ``passages``: each text separately, truncated to ``max_length``. ``packed``:
            documents concatenated and cut into blocks of ``max_length`` (RoBERTa's FULL-SENTENCES). ``pairs``: two
            segments for next sentence prediction (BERT's own recipe).
        hold_out: one document in this many is held out for validation, in each part without a validation split.
        short_pairs: share of the pairs that get a random shorter target length (BERT's ``short_seq_prob``).
        mask_probability: share of the tokens that are predicted.
        whole_word: choose whole words to predict instead of single tokens.
        stream: read the text from the hub without saving it, so that only tokens are on disk. The examples are the
            same.
        exponent: read training documents of each part in proportion to its number of documents to this power. The
            total stays the same: small parts are repeated, large parts truncated. 0.7 reads small languages more often
            (XLM). The documents are counted first. ``null`` reads every document once.
        assumptions: choices of the corpus's configuration file where a paper is silent, by option.
    """

    group: ClassVar[str] = "corpus"

    max_length: int = Field(ge=8)
    vocab_size: int | None = Field(None, ge=64)
    examples: Annotated[
        Literal["passages", "packed", "pairs"],
        Assumption(
            "a separator stands between two documents, as in RoBERTa's FULL-SENTENCES", "MiniLMv2 4.1", "packed"
        ),
        Assumption("pairs are drawn once, masks anew in every epoch; BERT used ten masked copies", "BERT A.2", "pairs"),
        Assumption("a rule on punctuation decides where a sentence ends; BERT names no splitter", "BERT A.2", "pairs"),
    ] = "passages"
    hold_out: Annotated[int, Assumption("one document in this many is held out", "all papers that pre-train")] = Field(
        200, ge=2
    )
    short_pairs: float = Field(0.1, ge=0, le=1)
    mask_probability: float = Field(0.15, gt=0, lt=1)
    whole_word: bool = False
    stream: bool = False
    exponent: float | None = Field(None, gt=0, le=1)
    assumptions: dict[str, Any] = Field(default_factory=dict, exclude=True)

    def spec(self) -> dict[str, Any]:
        without_effect = {"stream"} | ({"exponent"} if self.exponent is None else set())
        return {key: value for key, value in super().spec().items() if key not in without_effect}

    def documents(self, split: SplitName) -> Iterator[list[str]]:
        """Yield the documents of a split, each as a list of texts.

        Raises:
            UserError: the data of a part cannot be read.
        """
        parts = list(self.parts.values())
        if split == "validation" or self.exponent is None:
            yield from chain.from_iterable(self._part_documents(part, split) for part in parts)
            return
        sizes = [(part, sum(1 for _ in self._part_documents(part, split))) for part in parts]
        sizes = [(part, size) for part, size in sizes if size]  # hold_out may leave a part no training document
        for (part, size), quota in zip(sizes, quotas([size for _, size in sizes], self.exponent), strict=True):
            rounds = math.ceil(quota / size)
            yield from islice(chain.from_iterable(self._part_documents(part, split) for _ in range(rounds)), quota)

    def _part_documents(self, part: CorpusPart, split: SplitName) -> Iterator[list[str]]:
        """Yield the documents of one part, each once."""
        if part.validation is None:
            documents = enumerate(part.documents(part.train, self.stream))
            is_validation = split == "validation"
            yield from (texts for number, texts in documents if (number % self.hold_out == 0) == is_validation)
        else:
            yield from part.documents(part.train if split == "train" else part.validation, self.stream)

    def texts(self, split: SplitName) -> Iterator[str]:
        """Yield the texts of all documents of a split; raises the errors of ``documents``."""
        return chain.from_iterable(self.documents(split))


def quotas(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return the number of documents to read from each part, in proportion to ``size ** exponent``.

    The total is that of ``sizes`` up to rounding; each part gets at least one document.
    """
    powers = np.asarray(sizes, dtype=np.float64) ** exponent
    return [max(1, round(quota)) for quota in sum(sizes) * powers / powers.sum()]


class TransferSet(Mixture):
    """Unlabeled inputs of a task, on which a teacher's predictions are distilled (well-read students, Table 4).

    Attributes:
        size: number of examples, drawn from all parts without replacement; ``null`` takes all. The order of drawing
            is fixed, so that the smaller of two sets is part of the larger (Figure 8).
    """

    group: ClassVar[str] = "transfer"

    parts: dict[str, TransferPart] = Field(min_length=1)
    size: int | None = Field(None, ge=1)

    def examples(self) -> Examples:
        """Return the inputs as texts without labels; raises the errors of ``inputs`` and of ``texts``."""
        return Examples(self.texts(self.inputs()), None)

    def texts(self, columns: Sequence[Sequence[Any]]) -> list[list[str]]:
        """Return columns of inputs as texts.

        Raises:
            UserError: a cell is no text, such as a list of words.
        """
        try:
            return [list(map(text_of, column)) for column in columns]
        except ValueError as error:
            names = format_typed(next(iter(self.parts.values())).columns)
            raise UserError("transfer.parts", names, f"a row holds {error}", "Name columns of texts.") from error

    def inputs(self, further: Mapping[str, str] = MappingProxyType({})) -> list[list[Any]]:
        """Return the columns of the inputs, with the values of the data; rows with an empty text are left out.

        The rows are in the order of the parts, or in random order if ``size`` is set.

        Args:
            further: more columns to return after the texts, each with the configuration key that names it.
        Raises:
            UserError: a part cannot be read, the parts differ in their number of columns, or they have fewer rows
                than ``size``.
        """
        first = next(iter(self.parts.values()))
        num_texts = len(first.columns)
        columns: list[list[Any]] = [[] for _ in range(num_texts + len(further))]
        for part in self.parts.values():
            if len(part.columns) != num_texts:
                problem = f"the earlier parts have {num_texts} columns: all must be single texts, or all pairs"
                raise UserError(f"{part.key}.columns", part.columns, problem)
            table = read_table(part, part.train, further)
            names = [*part.columns, *further]
            rows = [
                row
                for row in zip(*(table.columns[name] for name in names), strict=True)
                if not any(is_missing(value) or value == "" for value in row[:num_texts])
            ]
            for column, values in zip(columns, zip(*rows[: part.limit], strict=True), strict=False):
                column.extend(values)
        if not columns[0]:
            problem = "no row has a text in each of them"
            raise UserError(f"{first.key}.columns", format_typed(first.columns), problem, "Name columns of texts.")
        if self.size is None:
            return columns
        if self.size > len(columns[0]):
            problem = f"the parts have only {len(columns[0])} examples"
            raise UserError("transfer.size", self.size, problem, override("transfer.size", None) + " takes all.")
        order = np.random.default_rng(ORDER_SEED).permutation(len(columns[0]))[: self.size]
        return [[column[row] for row in order] for column in columns]
