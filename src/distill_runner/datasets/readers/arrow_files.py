"""Parquet and Arrow files, and datasets of the library ``datasets``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distill_runner.common.errors import root_cause
from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row

ROWS_AT_ONCE = 1000
DAMAGED = "The file is damaged, incomplete or of another format than its name says: download or write it again."


class ArrowReader(Reader):
    """A Parquet file, or an Arrow file as ``save_to_disk`` of ``datasets`` writes it.

    Raises:
        FileProblem: the file is damaged.
    """

    names: Sequence[str]

    def __init__(self, file: Path, is_parquet: bool) -> None:
        self._file, self._is_parquet = file, is_parquet
        with self._opened(None) as (self.schema, _):
            self.names = self.schema.names
        if b"huggingface" in (self.schema.metadata or {}):
            import datasets

            self.class_names = class_names(datasets.Features.from_arrow_schema(self.schema))

    @contextmanager
    def _opened(self, names: Sequence[str] | None) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield the schema and an iterator over the rows in batches."""
        import pyarrow.parquet

        with arrow_errors():
            if self._is_parquet:
                with pyarrow.parquet.ParquetFile(self._file) as file:
                    yield file.schema_arrow, file.iter_batches(ROWS_AT_ONCE, columns=names)
                return
            with pyarrow.memory_map(str(self._file)) as source:
                try:
                    content: Any = pyarrow.ipc.open_stream(source)
                    batches = iter(content)
                except pyarrow.ArrowInvalid:  # the form that allows random access
                    content = pyarrow.ipc.open_file(source)
                    batches = map(content.get_batch, range(content.num_record_batches))
                yield content.schema, (batch if names is None else batch.select(names) for batch in batches)

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        with self._opened(None if names is None else [name for name in names if name in self.names]) as (_, batches):
            for batch in batches:
                yield from batch.to_pylist()


class LibraryReader(Reader):
    """Dataset of the library ``datasets``: loaded, or a stream of rows."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.names = dataset, dataset.column_names
        self.class_names = class_names(dataset.features or {})

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        dataset = self._dataset
        if names is not None and self.names is not None:
            dataset = dataset.select_columns([name for name in names if name in self.names])
        with arrow_errors():
            for batch in dataset.with_format("arrow").iter(ROWS_AT_ONCE):
                yield from batch.to_pylist()


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the values of columns; for lists, those of their elements."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: feature.names for name, feature in inner.items() if getattr(feature, "names", None)}


@contextmanager
def arrow_errors() -> Iterator[None]:
    """Turn the errors of pyarrow into problems of the file; errors of the system and of memory stay as they are."""
    import pyarrow

    try:
        yield
    except MemoryError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FileProblem(root_cause(error), DAMAGED) from error
