"""Location and columns of a data set: the common base of tasks and of the parts of a corpus."""

from abc import ABC, abstractmethod
from typing import Any, Self

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema

EMBEDDED = "embedded:"
EMBEDDED_DATA = tuple(EMBEDDED + name for name in ("pairs", "sentences", "questions", "text", "digits"))
ALL_FILES = "*"
"""Name of a split that consists of every data file of the folder, whatever its name."""


class Dataset(Schema, ABC):
    """Rows with named columns, in a folder, on the hub or embedded.

    Attributes:
        dataset: a hub id (``nyu-mll/glue``), a folder or a data file, or data of this package: ``embedded:pairs``,
            ``embedded:sentences``, ``embedded:questions``, ``embedded:text`` or ``embedded:digits``.
        config: configuration of the data set, which is a subfolder of a local folder; ``null`` if there is only one.
        revision: revision of the data set on the hub; ``null`` is ``main``.
        columns: names of one or two columns of texts, or of one column of images.
    Raises:
        UserError: there is no embedded data of this name.
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
        """Configuration key of this data set, for messages."""

    @property
    @abstractmethod
    def splits(self) -> set[str]:
        """All splits that the configuration uses."""

    @abstractmethod
    def role(self, split: str) -> str:
        """Return the configuration key that names ``split``."""

    @abstractmethod
    def needed(self, split: str) -> dict[str, str]:
        """Return the columns that ``split`` must have, each with the configuration field that names it."""

    @property
    def label_columns(self) -> list[str]:
        """Columns that are read if the data has them; for the first one, the names of its values are read, too."""
        return []

    def placed(self, split: str) -> tuple[Self, str]:
        """Return the data set that contains ``split``, and the name of the split there.

        A split may be in another configuration or another data set.
        """
        return self, split

    def can_lack(self, split: str) -> bool:
        """Return whether ``split`` is optional, so that its key can be removed from the configuration."""
        return False


def is_embedded(data: Dataset) -> bool:
    return data.dataset.startswith(EMBEDDED)
