"""Formats of data files: their names, and the readers that make a table of files of one format."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.common.files import placeholder
from distill_runner.datasets.readers import text_files
from distill_runner.datasets.readers.dataset import Dataset
from distill_runner.datasets.readers.delimited import DelimitedReader
from distill_runner.datasets.readers.table import ArrowReader, FileProblem, MemoryReader, Reader, Table, problems_of

PARQUET, CSV, TSV, JSON, JSON_LINES, ARROW = "parquet", "csv", "tsv", "json", "jsonl", "arrow"
PLAIN_TEXT, CONLL = "txt", "conll"
DATA_FORMATS: dict[str, str] = {
    ".parquet": PARQUET,
    ".csv": CSV,
    ".tsv": TSV,
    ".json": JSON,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".arrow": ARROW,  # as ``save_to_disk`` of ``datasets`` writes them, in one folder per split
    ".txt": PLAIN_TEXT,
    **dict.fromkeys((".conll", ".conllu", ".bio", ".iob"), CONLL),
}
"""File name extension, in any letter case -> format. Files of text may be compressed: ``train.csv.gz``."""
BINARY_FORMATS = frozenset({PARQUET, ARROW})
IMAGE_FORMATS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
"""Extensions of files with one image each, in folders ``<split>/<class>``."""
OTHER_FORMATS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save the sheet as CSV, in UTF-8 if there is a choice."),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "Unpack it."),
    **dict.fromkeys((".pkl", ".pickle", ".feather", ".h5", ".orc", ".avro", ".xml"), "Save it as Parquet or JSON."),
}
"""Extensions of other files with data -> what to do with them."""
FORMAT_NAMES = ", ".join(DATA_FORMATS)


def file_format(path: Path) -> str | None:
    """Return the format of a file by its name; None if it is not a file of data, or a hidden file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if path.name.startswith(".") or not suffixes:
        return None
    if suffixes[-1] in text_files.COMPRESSIONS:
        inner = DATA_FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if inner in BINARY_FORMATS else inner
    return DATA_FORMATS.get(suffixes[-1])


def require_format(key: str, file: Path, remedy: str = f"Known: {FORMAT_NAMES}.") -> None:
    """Raise a UserError for a file that has the name of no format of data; some others have their own remedy."""
    if not file_format(file):
        raise UserError(key, file, "is of a format that is not read", OTHER_FORMATS.get(file.suffix.lower(), remedy))


def open_files(
    data: Dataset, files: list[Path], origin: str, class_names: Mapping[str, list[str]] | None = None
) -> Table:
    """Return the table of data files of one format.

    Args:
        class_names: names of the values of columns that a card of the hub gives.
    Raises:
        FileProblem: a file cannot be read, or could be read in several ways.
    """
    if files[0].suffix.lower() in IMAGE_FORMATS:
        classes = sorted({file.parent.name for file in files})
        number = {name: label for label, name in enumerate(classes)}
        columns = {"image": list[Any](files), "label": [number[file.parent.name] for file in files]}
        return Table(origin, {f"{files[0].parent.parent.name}/": MemoryReader(columns, {"label": classes})})
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [os.path.relpath(file, os.path.commonpath(files)) for file in files]
    readers: dict[str, Reader] = {}
    kind, texts = file_format(files[0]), dict[str, text_files.TextFile]()
    for name, file in zip(names, files, strict=True):
        with problems_of(name if len(files) > 1 else ""):
            if text := placeholder(file):
                problem, _, remedy = text.partition(": ")
                raise FileProblem(problem, f"{remedy[0].upper()}{remedy[1:]}.")
            if kind in BINARY_FORMATS:
                readers[name] = ArrowReader(file, kind == PARQUET)
            elif file.stat().st_size:
                texts[name] = text_files.TextFile(file, data.encoding, f"{data.key}.encoding")
                if next(texts[name].lines(), "").startswith("#FORMAT=WebAnno"):
                    raise FileProblem("is INCEpTION's WebAnno TSV, which is not read", "Export it as CoNLL 2003.")
    may_have_words = data.has_words and kind in (PLAIN_TEXT, TSV)
    has_words = kind == CONLL or (may_have_words and all(map(text_files.is_conll, texts.values())))
    for name, text_file in texts.items():
        with problems_of(name if len(files) > 1 else ""):
            if has_words:
                readers[name] = text_files.ConllReader(text_file)
            elif kind in (JSON, JSON_LINES):
                readers[name] = text_files.JsonReader(text_file, kind == JSON_LINES)
            elif kind == PLAIN_TEXT:
                readers[name] = text_files.PlainTextReader(text_file, data.lines_are_texts)
            else:
                readers[name] = DelimitedReader(text_file, kind == TSV)
    table = Table(origin, readers)
    table.class_names |= class_names or {}
    return table
