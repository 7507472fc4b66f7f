"""Corpora and transfer sets as mixtures of named parts, each read from a separate data set."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.fingerprints import data_fingerprint
from distill_runner.datasets.reading.tables import rows

WHERE = {"dataset", "config", "revision"}
"""Fields that locate the data; a part's spec contains a hash of the content instead."""


class CorpusPart(Dataset):
    """Text from one data set.

    Each row is a document unless ``document_column``, ``document_start`` or ``rows_per_document`` is set. Each of these
    joins consecutive rows into documents; the first one that is set applies.

    Attributes:
        train: training split; ``*`` takes every file of a folder.
        validation: validation split; ``null`` holds out training documents instead (``corpus.hold_out``).
        document_column: consecutive rows with the same value in this column form a document (chapters of one novel).
        document_start: regular expression that matches the beginning of a document's first row (WikiText's headings).
        rows_per_document: number of rows per document, for data that has lost the borders of documents, such as
            BookCorpus with one sentence per row.
        limit: maximum number of documents taken from each split, or of rows in a transfer set; ``null`` takes all.
    """

    _key: str = PrivateAttr("parts")
    train: str = "train"
    validation: str | None = None
    document_column: str | None = None
    document_start: str | None = None
    rows_per_document: int = Field(1, ge=1)
    limit: int | None = Field(None, ge=1)

    @field_validator("document_start")
    @classmethod
    def _is_an_expression(cls, expression: str | None) -> str | None:
        try:
            re.compile(expression or "")
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from error
        return expression

    @property
    def key(self) -> str:
        return self._key

    @property
    def splits(self) -> set[str]:
        return {self.train} | ({self.validation} if self.validation else set())

    def role(self, split: str) -> str:
        return f"{self.key}.{'validation' if split == self.validation != self.train else 'train'}"

    def needed(self, split: str) -> dict[str, str]:
        column = {self.document_column: "document_column"} if self.document_column else {}
        return column | dict.fromkeys(self.columns, "columns")

    def spec(self) -> dict[str, Any]:
        """Return all that determines the text, independent of where the data is stored."""
        return {**self.model_dump(exclude=WHERE), "content": data_fingerprint(self)}

    def documents(self, split: str, stream: bool = False) -> Iterator[list[str]]:
        """Yield each document as the list of its texts, in order; empty texts and empty documents are left out.

        Raises:
            UserError: the split cannot be read, or holds no text.
        """
        return islice(self._documents(split, stream), self.limit)

    def _documents(self, split: str, stream: bool) -> Iterator[list[str]]:
        document, before, found = list[str](), None, False
        for number, row in enumerate(rows(self, split, stream)):
            texts = [str(row[column]).strip() for column in self.columns if row[column] is not None]
            value = row[self.document_column] if self.document_column else None
            if document and self._starts(number, texts, value != before):
                yield document
                document = []
            document, before = document + [text for text in texts if text], value
            found = found or bool(document)
        if document:
            yield document
        if not found:
            raise UserError(self.role(split), split, f"no text in the column {', '.join(self.columns)}")

    def _starts(self, number: int, texts: list[str], changed: bool) -> bool:
        """Return whether row ``number`` begins a new document."""
        if self.document_column:
            return changed
        if self.document_start:
            return bool(texts and re.match(self.document_start, texts[0]))
        return number % self.rows_per_document == 0


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
    parts: dict[str, CorpusPart] = Field(min_length=1)

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name, part in self.parts.items():
            part._key = f"{self.group}.parts.{name}"
        return self

    def spec(self) -> dict[str, Any]:
        """Return all that determines the text; the names and the location of the data are left out."""
        parts = [part.spec() for part in self.parts.values()]
        return {**self.model_dump(exclude={"name", "parts"}), "parts": parts}
