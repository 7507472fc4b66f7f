"""Bodies of text made of named parts, each read from its own data set."""

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
"""Fields that say where the text lies; of these only the content counts."""


class CorpusPart(Dataset):
    """Text from one data set.

    A row is a document of its own unless one of the next three fields says otherwise; consecutive rows then make one.

    Attributes:
        train: split; ``*`` takes every file of a folder.
        validation: held-out split; ``None`` leaves it to the whole to hold documents back.
        document_column: rows with the same value in this column belong together (the chapters of one novel).
        document_start: a regular expression that the first row of a document matches (the headings of WikiText).
        rows_per_document: for data that has lost its borders, such as BookCorpus with a sentence per row.
        limit: take that many documents of each split; all by default.
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
        """All that determines the text, wherever it lies."""
        return {**self.model_dump(exclude=WHERE), "content": data_fingerprint(self)}

    def documents(self, split: str, stream: bool = False) -> Iterator[list[str]]:
        """Documents as the texts of their rows, in order; empty texts are left out, and so are empty documents.

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
        """Whether the row of this number begins a new document."""
        if self.document_column:
            return changed
        if self.document_start:
            return bool(texts and re.match(self.document_start, texts[0]))
        return number % self.rows_per_document == 0


class Mixture(Schema):
    """Named parts, one after the other in the order given.

    Attributes:
        name: for people.
        version: raised when the same configuration comes to mean other text.
        parts: a mapping, so that one value of one part can be set on the command line.
    """

    group: ClassVar[str]
    """The configuration group, for messages."""

    name: str
    version: int = 1
    parts: dict[str, CorpusPart] = Field(min_length=1)

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name, part in self.parts.items():
            part._key = f"{self.group}.parts.{name}"
        return self

    def spec(self) -> dict[str, Any]:
        """All that has a say in what is read; where it lies and what it is called have none."""
        parts = [part.spec() for part in self.parts.values()]
        return {**self.model_dump(exclude={"name", "parts"}), "parts": parts}
