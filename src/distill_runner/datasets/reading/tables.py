"""Reading of the rows of a split. This module does not interpret labels."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.datasets.reading.dataset import Dataset, is_embedded
from distill_runner.datasets.reading.embedded import read_embedded
from distill_runner.datasets.reading.folders import IMAGES, local_data, split_files
from distill_runner.datasets.reading.load import from_files, from_hub, quiet, streamed
from distill_runner.datasets.reading.slices import parse
from distill_runner.datasets.reading.split_table import SplitTable, check_columns, damaged, empty, placed


def read(data: Dataset, split: str) -> SplitTable:
    """Return the needed columns of a split, or of a part of a split such as ``train[:90%]``.

    Raises:
        UserError: files, split or columns are missing, damaged or empty, or the hub cannot be reached.
    """
    with placed(data, split) as (where, name):
        return _read(where, name)


def _read(data: Dataset, split: str) -> SplitTable:
    name, part = parse(split)
    if part is not None:
        whole = _read(data, name)
        chosen = part.rows(max(map(len, whole.columns.values()), default=0)).tolist()
        if not chosen:
            raise UserError(data.role(split), split, "holds no rows", "train[:90%], train[90%:] or train[~:90%]")
        columns = {column: [values[row] for row in chosen] for column, values in whole.columns.items()}
        return SplitTable(columns, whole.class_names)
    if (table := _without_datasets(data, split)) is not None:
        return table
    folder = local_data(data)
    # The cache of ``datasets`` identifies a file by path and time, which may be equal for different content
    # (archives often set one time for all their files). A temporary cache cannot be stale.
    with quiet(), TemporaryDirectory() as cache:
        if folder is None:
            found = from_hub(data, split, Path(cache, "view"), cache_dir=cache)
        else:
            found = from_files(data, split, folder, cache_dir=cache)
        check_columns(data, split, found.column_names)
        if not len(found):
            raise empty(data, split, folder or data.dataset)
        asked = {*data.needed(split), *data.label_columns}
        columns = found.select_columns([name for name in found.column_names if name in asked]).to_dict()
        labels = found.features.get(next(iter(data.label_columns), None))
    # The names are those of the elements of a list, or of a single value.
    return SplitTable(columns, getattr(getattr(labels, "feature", labels), "names", None))


def rows(data: Dataset, split: str, stream: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split one by one, with little memory; a part such as ``train[:90%]`` is not supported.

    Args:
        stream: read from the hub while iterating, without a copy on disk; without effect on local files.
    Raises:
        UserError: as ``read``; raised at the first row, or when a damaged row is reached.
    """
    with placed(data, split) as (where, name):
        yield from _rows(where, name, stream)


def _rows(data: Dataset, split: str, stream: bool) -> Iterator[dict[str, Any]]:
    if (table := _without_datasets(data, split)) is not None:
        columns = table.columns
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return
    folder, number = local_data(data), 0
    with quiet(), TemporaryDirectory() as place:
        if folder is not None:
            found = from_files(data, split, folder, streaming=True)
        elif stream:
            found = streamed(data, split)
        else:
            found = from_hub(data, split, Path(place), streaming=True)
        try:
            for number, row in enumerate(found, start=1):
                if number == 1:
                    check_columns(data, split, list(row))
                yield row
        except (OSError, ValueError) as error:
            raise damaged(data, split, folder or data.dataset, error) from error
    if not number:
        raise empty(data, split, folder or data.dataset)


def _without_datasets(data: Dataset, split: str) -> SplitTable | None:
    """Return a split of embedded data or of a folder of images; None for data that the library ``datasets`` reads."""
    if is_embedded(data):
        return read_embedded(data, split)
    folder = local_data(data)
    if folder is not None and (files := split_files(folder, split, data))[0].suffix.lower() in IMAGES:
        return _image_files(data, split, files)
    return None


def _image_files(data: Dataset, split: str, files: list[Path]) -> SplitTable:
    """Return the files in the column ``image``, and the number of each file's folder in ``label``."""
    names = sorted({file.parent.name for file in files})
    number = {name: place for place, name in enumerate(names)}
    columns: dict[str, list[Any]] = {"image": list(files), "label": [number[file.parent.name] for file in files]}
    check_columns(data, split, list(columns))
    return SplitTable(columns, names)


class _AnyColumns(Dataset):
    """View of the data set ``of`` that requires no columns."""

    columns: list[str] = Field(default_factory=list)
    of: Any

    @property
    def key(self) -> str:
        return str(self.of.key)

    @property
    def splits(self) -> set[str]:
        return set(self.of.splits)

    def role(self, split: str) -> str:
        return str(self.of.role(split))

    def needed(self, split: str) -> dict[str, str]:
        return {}


def column_names(data: Dataset, split: str) -> dict[str, bool]:
    """Return the columns of a split, each with whether the first row has a text in it.

    Raises:
        UserError: as ``read``.
    """
    with placed(data, split) as (where, name):
        place = {"dataset": where.dataset, "config": where.config, "revision": where.revision}
        first = next(iter(_rows(_AnyColumns(**place, of=where), parse(name)[0], False)))
    return {name: isinstance(value, str) for name, value in first.items()}
