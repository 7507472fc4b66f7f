"""Parquet and Arrow files: columns with the types of their schema, and names of classes that ``datasets`` stored."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distill_runner.common.errors import root_cause
from distill_runner.datasets.readers.delimited import require_same_columns
from distill_runner.datasets.readers.table import (
    BYTES,
    DIGITS,
    EMPTY,
    FLAG,
    LIST,
    MAPPING,
    MIXED,
    NUMBER,
    TEXT,
    TIME,
    FileProblem,
    FilesTable,
    is_number,
)

ROWS_AT_ONCE = 1000
DAMAGED = "The file is damaged, incomplete or of another format than its name says: download or write it again."


class ArrowTable(FilesTable):
    """Parquet or Arrow files with the same columns.

    Args:
        files: the files by name.
        is_parquet: whether they are Parquet files; otherwise they are as ``save_to_disk`` of ``datasets`` writes them.
        class_names: names of the values of columns that the files themselves do not hold.
    Raises:
        FileProblem: a file is damaged, or the files differ in a column or its type.
    """

    def __init__(
        self,
        origin: str,
        files: Mapping[str, Path],
        is_parquet: bool,
        class_names: Mapping[str, list[str]] | None = None,
    ) -> None:
        super().__init__(origin, files)
        self._paths, self._is_parquet = list(files.values()), is_parquet
        with _arrow_errors():
            schemas = [self._schema(path) for path in self._paths]
        self._schema_of_all = schemas[0]
        self.column_names = list(schemas[0].names)
        names = list(files)
        for name, schema in zip(names[1:], schemas[1:], strict=True):
            require_same_columns(name, schema.names, names[0], self.column_names)
            for column in self.column_names:
                first, other = schemas[0].field(column).type, schema.field(column).type
                if _kind(first) != _kind(other) and EMPTY not in (_kind(first), _kind(other)):
                    problem = f"the column {column!r} is {_kind(first)} in {names[0]}, but {_kind(other)} in {name}"
                    raise FileProblem(problem, "Write all files of a split with the same types.")
        self.stored_class_names |= self._class_names(names, schemas) | dict(class_names or {})

    def _class_names(self, files: Sequence[str], schemas: Sequence[Any]) -> dict[str, list[str]]:
        """Return the names of classes by column; raises ``FileProblem`` if files have different ones."""
        classes_of: dict[str, tuple[str, list[str]]] = {}
        for file, schema in zip(files, schemas, strict=True):
            for column, classes in _stored_class_names(schema).items():
                first, expected = classes_of.setdefault(column, (file, classes))
                if classes != expected:
                    problem = f"the classes of {column!r} are {expected} in {first}, but {classes} in {file}"
                    raise FileProblem(problem, "Write all files of a split with the same classes in the same order.")
        return {column: classes for column, (_, classes) in classes_of.items()}

    def _schema(self, path: Path) -> Any:
        import pyarrow.parquet

        if self._is_parquet:
            return pyarrow.parquet.read_schema(path)
        with _open_arrow(path) as reader:
            return reader.schema

    def _batches(self, path: Path, names: list[str] | None) -> Iterator[Any]:
        """Yield the rows of a file in record batches, with the columns ``names`` or all."""
        import pyarrow.parquet

        with _arrow_errors():
            if self._is_parquet:
                with pyarrow.parquet.ParquetFile(path) as file:
                    yield from file.iter_batches(ROWS_AT_ONCE, columns=names)
                return
            with _open_arrow(path) as reader:
                for batch in reader:
                    yield batch if names is None else batch.select(names)

    def rows_of(self, number: int) -> Iterator[dict[str, Any]]:
        rows = 0
        for batch in self._batches(self._paths[number], None):
            yield from batch.to_pylist()
            rows += len(batch)
        self.records[number].rows = rows

    def columns(self, names: Iterable[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in names if name in self.column_names}
        for path, record in zip(self._paths, self.records, strict=True):
            record.rows = 0
            for batch in self._batches(path, list(columns)):
                for name, values in columns.items():
                    values.extend(batch.column(name).to_pylist())
                record.rows += len(batch)
        self._is_read = True
        return columns

    def column_types(self) -> dict[str, str]:
        types = {field.name: _kind(field.type) for field in self._schema_of_all}
        undecided = {name for name, kind in types.items() if kind == TEXT}
        numeric: set[str] = set()
        for path in self._paths:
            for batch in self._batches(path, sorted(undecided)) if undecided else ():
                for name in sorted(undecided):
                    values = {value for value in batch.column(name).to_pylist() if value and value.strip()}
                    if all(map(is_number, values)):
                        numeric |= {name} if values else set()
                    else:
                        undecided.discard(name)
                        numeric.discard(name)
                if not undecided:
                    break
        return types | dict.fromkeys(undecided - numeric, EMPTY) | dict.fromkeys(numeric, DIGITS)


@contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    """Open an Arrow file in either of its two forms, and yield an iterator over its batches with a ``schema``."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            reader = _FileBatches(file)
        yield reader


class _FileBatches:
    """Batches of an Arrow file in the form that allows random access."""

    def __init__(self, file: Any) -> None:
        self.schema, self._file = file.schema, file

    def __iter__(self) -> Iterator[Any]:
        return map(self._file.get_batch, range(self._file.num_record_batches))


@contextmanager
def _arrow_errors() -> Iterator[None]:
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


def _kind(arrow_type: Any) -> str:
    """Return the type of a column from its Arrow type."""
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    checks = (
        (EMPTY, types.is_null),
        (TEXT, lambda kind: types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)),
        (FLAG, types.is_boolean),
        (NUMBER, lambda kind: types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)),
        (LIST, lambda kind: types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)),
        (MAPPING, lambda kind: types.is_struct(kind) or types.is_map(kind)),
        (BYTES, lambda kind: types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)),
        (TIME, types.is_temporal),
    )
    return next((name for name, check in checks if check(arrow_type)), MIXED)


def _stored_class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of classes that ``datasets`` stored with the schema; for lists, those of their elements."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    names = {}
    for column, feature in features.items():
        if isinstance(feature, list) and len(feature) == 1:  # as older versions wrote lists
            feature = feature[0]
        inner = feature.get("feature", feature) if isinstance(feature, dict) else {}
        if isinstance(inner, dict) and isinstance(inner.get("names"), list):
            names[column] = inner["names"]
    return names
