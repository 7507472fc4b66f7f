"""Data files on this machine: where a dataset is, which files a split has, and how the files are opened."""

import csv
import os
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError, root_cause
from distill_runner.common.process import offline_datasets
from distill_runner.datasets.readers.dataset import ALL_FILES, Dataset, is_embedded

# A text or a class may be "NA" or "null". The type of a column follows from all rows of a file, not from the first.
_CSV: dict[str, Any] = {"keep_default_na": False, "chunksize": 10**9}
DATA_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", _CSV),
    # Quotation marks are plain characters, as in GLUE's files; otherwise an unpaired one would swallow rows.
    ".tsv": ("csv", {**_CSV, "sep": "\t", "quoting": csv.QUOTE_NONE}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".arrow": ("arrow", {}),  # as ``save_to_disk`` of ``datasets`` writes them, in one folder per split
    ".txt": ("text", {"sample_by": "paragraph"}),  # one row per paragraph; blank lines separate paragraphs
}
"""File name extension -> builder of ``datasets`` and its options."""
IMAGE_FORMATS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
"""Extensions of files with one image each, in folders ``<split>/<class>``."""

_SYNONYMS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing"))


def local_data(data: Dataset) -> Path | None:
    """Return the folder of the data files, or a single data file; ``None`` for the hub and for embedded data.

    The path ``dataset`` is tried first, then the hub id below ``DISTILL_DATA_DIR``, by its full or its last name. If a
    folder there lacks the configuration, the hub is used.

    Raises:
        UserError: the folder does not exist or lacks the configuration.
    """
    if is_embedded(data):
        return None
    if not data.dataset.strip():
        raise UserError(f"{data.key}.dataset", data.dataset, "is empty", "Give a folder, or a hub id: nyu-mll/glue")
    path = Path(data.dataset).expanduser()
    if path.is_dir():
        if folder := _config_folder(path, data.config):
            return folder
        raise _no_such_config(data, path)
    if path.is_file() and path.suffix in DATA_FORMATS:
        return path
    for root in local_copies(data):
        if folder := _config_folder(root, data.config):
            return folder
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", data.dataset):
        remedy = f"{data.key}.dataset=<folder with train.csv, validation.csv and so on>, or a hub id: nyu-mll/glue"
        raise UserError(f"{data.key}.dataset", data.dataset, "no such folder", remedy)
    return None


def local_copies(data: Dataset) -> list[Path]:
    """Return the folders below ``DISTILL_DATA_DIR`` that have the full or last name of the dataset."""
    if not (root := os.environ.get("DISTILL_DATA_DIR")):
        return []
    names = dict.fromkeys((data.dataset, data.dataset.rpartition("/")[2]))
    return [folder for name in names if (folder := Path(root).expanduser() / name).is_dir()]


def split_files(folder: Path, split: str, data: Dataset) -> list[Path]:
    """Return the files of a split, named ``<split>.<ext>`` or ``<split>-*.<ext>``.

    Without such files, synonyms are tried (``dev.csv``), and folders of arrow files or images. ``*`` takes all files.
    A single file as ``folder`` is the split ``train``.

    Raises:
        UserError: there is no file of the split, or there are files of several formats.
    """
    if folder.is_file():
        if split == "train":
            return [folder]
        problem = f"{folder.name} is one file, and its rows form the split train"
        remedy = "Set task.split_off=0.1: a tenth of the rows is then used for validation."
        if "split_off" not in type(data).model_fields:
            remedy = "Use a part of it: train[90%:] here, and task.train=train[:90%]."
        raise UserError(data.split_key(split), split, problem, remedy)
    if matches := _matching_files(folder, split, data):
        return matches
    files = _data_files(folder)
    available = sorted({re.sub(r"-\d+-of-\d+$", "", file.stem) for file in files} | set(_image_splits(folder)))
    raise missing_split(data, split, available, str(folder))


def _matching_files(folder: Path, split: str, data: Dataset) -> list[Path]:
    """Return the files of a split in a folder, as ``split_files`` does; empty if there are none."""
    if split == "train" and (folder / "state.json").is_file():
        return _arrow_files(folder)
    files = _data_files(folder)
    synonyms = next((names for names in _SYNONYMS if split in names), ())
    for name in (split, *synonyms):
        matches = [file for file in files if name in (file.stem, ALL_FILES) or file.stem.startswith(f"{name}-")]
        if len({file.suffix for file in matches}) > 1:
            problem = f"several file formats in {folder}: {', '.join(file.name for file in matches)}"
            raise UserError(data.split_key(split), split, problem, "Keep the files of one format.")
        if matches := matches or _arrow_files(folder / name) or _image_files(folder / name):
            return matches
    return []


def has_local_split(data: Dataset, split: str) -> bool:
    """Return whether the folder of ``data`` has files of a split; False for data that are not in a folder.

    Raises:
        UserError: there are files of several formats.
    """
    try:
        folder = local_data(data)
    except UserError:  # raised again when the data are read
        return False
    return folder is not None and folder.is_dir() and bool(_matching_files(folder, split, data))


def _config_folder(root: Path, config: str | None) -> Path | None:
    folder = root / config if config else root
    is_saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    return folder if is_saved or _data_files(folder) or _image_splits(folder) else None


def _data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder and of its subfolder ``data``, which the hub uses for data without a config."""
    candidates = (path for place in (folder, folder / "data") if place.is_dir() for path in place.iterdir())
    return sorted(path for path in candidates if path.suffix in DATA_FORMATS and path.is_file())


def _arrow_files(folder: Path) -> list[Path]:
    """Return the files that ``save_to_disk`` wrote, without the cached results of ``map`` and ``filter``."""
    return sorted(file for file in folder.glob("*.arrow") if not file.name.startswith("cache-"))


def _image_files(folder: Path) -> list[Path]:
    """Return the images of a split's folder, class by class."""
    images = (file for file in folder.glob("*/*") if file.suffix.lower() in IMAGE_FORMATS)
    return sorted(images) if folder.is_dir() else []


def _image_splits(folder: Path) -> list[str]:
    """Return the names of the subfolders named like a split that contain folders of images."""
    names = {name for names in _SYNONYMS for name in names}
    return sorted(path.name for path in folder.glob("*/") if path.name in names and _image_files(path))


def load_files(data: Dataset, split: str, files: list[Path], **options: Any) -> Any:
    """Return the rows of data files as a dataset of the library ``datasets``.

    Raises:
        UserError: a file is empty or damaged, or a CSV file does not name all columns.
    """
    builder, format_options = DATA_FORMATS[files[0].suffix]
    if files[0].suffix == ".csv":
        format_options = format_options | {"sep": _separator(files[0])}
    if builder == "csv":
        for file in files:
            _require_header(data, file, format_options["sep"], format_options.get("quoting", csv.QUOTE_MINIMAL))
    names = [str(file) for file in files]
    try:
        return load_dataset(True, builder, data_files=names, split="train", **options, **format_options)
    except Exception as error:
        if "corresponds to no data" in str(error) or not any(file.stat().st_size for file in files):
            raise empty_split(data, split, file_names(files)) from error
        raise unreadable_split(data, split, file_names(files), error) from error


def file_names(files: list[Path]) -> str:
    """Return the names of the first files and of their folder, for messages."""
    return ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "") + f" in {files[0].parent}"


def _separator(file: Path) -> str:
    """Return the separator of a CSV file: a comma, unless its first line has no comma but another separator."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        header = stream.readline()
    others = [sign for sign in (";", "\t", "|") if sign in header]
    return others[0] if others and "," not in header else ","


def _require_header(data: Dataset, file: Path, separator: str, quoting: Any) -> None:
    """Check that the first row has no more fields than the header: pandas would take the first field for an index.

    Raises:
        UserError: the row has more fields.
    """
    with file.open(encoding="utf-8", errors="replace", newline="") as stream, suppress(csv.Error):
        rows = csv.reader(stream, delimiter=separator, quoting=quoting)
        header, first = next(rows, []), next(rows, [])
        if len(first) > len(header):
            problem = f"{file.name} names {len(header)} columns, but its first row has {len(first)} fields"
            remedy = f"Quote texts that contain {separator!r}, or name every column in the first line."
            raise UserError(f"{data.key}.dataset", data.dataset, problem, remedy)


def load_dataset(offline: bool, *args: Any, **options: Any) -> Any:
    """Call ``load_dataset`` of ``datasets``; with ``offline``, without any request to the hub."""
    import datasets

    with offline_datasets() if offline else nullcontext():
        return datasets.load_dataset(*args, **options)


def missing_split(data: Dataset, split: str, available: list[str], place: str) -> UserError:
    """Return the error for a missing split; its remedy is the override that changes or removes the split."""
    key = data.split_key(split)
    # Hydra merges `key={...}` into the existing mapping, so that only `~` removes an entry.
    remedy = f"Leave it out with '~{key}'" if data.is_optional(split) else f"Set {key}"
    return UserError(key, split, f"no such split in {place}", f"It has: {', '.join(available)}. {remedy}")


def empty_split(data: Dataset, split: str, origin: str) -> UserError:
    """Return the error for a split without rows; ``origin`` names its files."""
    return UserError(data.split_key(split), split, f"the split is empty ({origin})", "Download or write it again.")


def unreadable_split(data: Dataset, split: str, origin: str, error: Exception) -> UserError:
    """Return the error for a split that cannot be read; ``origin`` names its files."""
    remedy = "The file is damaged, incomplete or of another format than its name says: download or write it again."
    return UserError(data.split_key(split), split, f"cannot read {origin}: {root_cause(error)}", remedy)


def _no_such_config(data: Dataset, root: Path) -> UserError:
    configs = sorted(path.name for path in root.iterdir() if path.is_dir() and _data_files(path))
    if configs:
        problem = f"{'needs a value' if data.config is None else 'no such folder with data files'} in {root}"
        return UserError(f"{data.key}.config", data.config, problem, f"It has: {', '.join(configs)}.")
    if data.config and _data_files(root):
        problem = f"{root} has data files, but no such subfolder"
        return UserError(f"{data.key}.config", data.config, problem, f"{data.key}.config=null")
    problem = f"no data files ({', '.join(DATA_FORMATS)}) in this folder"
    remedy = "Name them train.csv, validation.csv and so on, or put images into train/<class>/."
    return UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
