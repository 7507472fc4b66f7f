"""Where rows of text lie: what a task, and each part of a corpus, have in common."""

from abc import ABC, abstractmethod
from typing import Any, Self

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema

EMBEDDED = "embedded:"
EMBEDDED_DATA = tuple(EMBEDDED + name for name in ("pairs", "sentences", "questions", "text", "digits"))
ALL_FILES = "*"
"""As the name of a split: every data file of the folder, whatever it is called."""


class Dataset(Schema, ABC):
    """Rows with named columns, in a folder, on the hub or embedded.

    Attributes:
        dataset: a hub id (``nyu-mll/glue``), a folder, or one of ``EMBEDDED_DATA``.
        config: the data set's configuration, a subfolder of a local folder; ``None`` where there is only one.
        revision: of the hub id; ``None`` is ``main``.
        columns: one or two columns of texts, or one of images.
    Raises:
        UserError: there is no such embedded data.
    """

    dataset: str
    config: str | None = None
    revision: str | None = None
    columns: list[str] = Field(min_length=1, max_length=2)

    def model_post_init(self, _context: Any) -> None:
        if is_embedded(self) and self.dataset not in EMBEDDED_DATA:
            raise UserError(f"{self.key}.dataset", self.dataset, "no such embedded data", " or ".join(EMBEDDED_DATA))

    @property
    @abstractmethod
    def key(self) -> str:
        """Where this stands in the configuration, for messages."""

    @property
    @abstractmethod
    def splits(self) -> set[str]:
        """All splits in use."""

    @abstractmethod
    def role(self, split: str) -> str:
        """The configuration key that names ``split``."""

    @abstractmethod
    def needed(self, split: str) -> dict[str, str]:
        """The columns that a split must have, each with the field that names it."""

    @property
    def label_columns(self) -> list[str]:
        """Columns that are read where they are there, the first one with the names of its values."""
        return []

    def placed(self, split: str) -> tuple[Self, str]:
        """Where a split lies, and its name there: a split may be of another configuration or data set."""
        return self, split

    def can_lack(self, split: str) -> bool:
        """Whether the data may do without ``split``, so that its key can be removed."""
        return False


def is_embedded(data: Dataset) -> bool:
    return data.dataset.startswith(EMBEDDED)
