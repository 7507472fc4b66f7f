"""Location of data files on this machine. This module reads file names only, and imports nothing heavy."""

import csv
import os
import re
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.datasets.reading.dataset import ALL_FILES, Dataset, is_embedded

# A text or a class may be "NA" or "null". The type of a column follows from all rows of a file, not from the first.
_CSV: dict[str, Any] = {"keep_default_na": False, "chunksize": 10**9}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", _CSV),
    # Quoting 3: quotation marks are plain characters, as in GLUE's files; otherwise an unpaired one would swallow rows.
    ".tsv": ("csv", {**_CSV, "sep": "\t", "quoting": csv.QUOTE_NONE}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".arrow": ("arrow", {}),  # as ``save_to_disk`` of ``datasets`` writes them, in one folder per split
    ".txt": ("text", {"sample_by": "paragraph"}),  # one row per paragraph; blank lines separate paragraphs
}
"""File name extension -> builder of ``datasets`` and its options."""
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
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
    given = Path(data.dataset).expanduser()
    if given.is_dir():
        if folder := _data_folder(given, data.config):
            return folder
        raise _no_such_config(data, given)
    if given.is_file() and given.suffix in READERS:
        return given
    for root in local_copies(data):
        if folder := _data_folder(root, data.config):
            return folder
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", data.dataset):
        remedy = f"{data.key}.dataset=<folder with train.csv, validation.csv and so on>, or a hub id: nyu-mll/glue"
        raise UserError(f"{data.key}.dataset", data.dataset, "no such folder", remedy)
    return None


def local_copies(data: Dataset) -> list[Path]:
    """Return the folders below ``DISTILL_DATA_DIR`` that have the full or last name of the data set."""
    if not (root := os.environ.get("DISTILL_DATA_DIR")):
        return []
    names = dict.fromkeys((data.dataset, data.dataset.rpartition("/")[2]))
    return [folder for name in names if (folder := Path(root).expanduser() / name).is_dir()]


def split_files(folder: Path, split: str, data: Dataset) -> list[Path]:
    """Return the files of a split, named ``<split>.<ext>`` or ``<split>-*.<ext>``.

    Without such files, synonyms are tried (``dev.csv``), and folders of arrow files or images. ``*`` takes all files.
    A single file as ``folder`` is the split ``train``.

    Raises:
        UserError: there is no file of the split, or there are files of more than one kind.
    """
    if folder.is_file():
        if split == "train":
            return [folder]
        problem = f"{folder.name} is one file, and its rows form the split train"
        remedy = "Set task.split_off=0.1: a tenth of the rows is then used for validation."
        if "split_off" not in type(data).model_fields:
            remedy = "Use a part of it: train[90%:] here, and task.train=train[:90%]."
        raise UserError(data.role(split), split, problem, remedy)
    if split == "train" and (folder / "state.json").is_file():
        return _saved(folder)
    files = _files(folder)
    synonyms = next((names for names in _SYNONYMS if split in names), ())
    for name in (split, *synonyms):
        chosen = [file for file in files if name in (file.stem, ALL_FILES) or file.stem.startswith(f"{name}-")]
        if len({file.suffix for file in chosen}) > 1:
            problem = f"more than one kind of file in {folder}: {', '.join(file.name for file in chosen)}"
            raise UserError(data.role(split), split, problem, "Keep files of one kind.")
        if chosen := chosen or _saved(folder / name) or _images(folder / name):
            return chosen
    available = sorted({re.sub(r"-\d+-of-\d+$", "", file.stem) for file in files} | set(_image_splits(folder)))
    raise missing_split(data, split, available, str(folder))


def missing_split(data: Dataset, split: str, available: list[str], place: str) -> UserError:
    """Return the error for a missing split; its remedy is the override that changes or removes the split."""
    key = data.role(split)
    # Hydra merges `key={...}` into the existing mapping, so that only `~` removes an entry.
    remedy = f"Leave it out with '~{key}'" if data.can_lack(split) else f"Set {key}"
    return UserError(key, split, f"no such split in {place}", f"It has: {', '.join(available)}. {remedy}")


def _data_folder(root: Path, config: str | None) -> Path | None:
    folder = root / config if config else root
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    return folder if saved or _files(folder) or _image_splits(folder) else None


def _files(folder: Path) -> list[Path]:
    """Return the data files of a folder and of its subfolder ``data``, which the hub uses for data without a config."""
    candidates = (path for place in (folder, folder / "data") if place.is_dir() for path in place.iterdir())
    return sorted(path for path in candidates if path.suffix in READERS and path.is_file())


def _saved(folder: Path) -> list[Path]:
    """Return the files that ``save_to_disk`` wrote, without the results of ``map`` and ``filter`` beside them."""
    return sorted(file for file in folder.glob("*.arrow") if not file.name.startswith("cache-"))


def _images(folder: Path) -> list[Path]:
    """Return the images of a split's folder, class by class."""
    return sorted(file for file in folder.glob("*/*") if file.suffix.lower() in IMAGES) if folder.is_dir() else []


def _image_splits(folder: Path) -> list[str]:
    """Return the names of the subfolders named like a split that contain folders of images."""
    names = {name for names in _SYNONYMS for name in names}
    return sorted(path.name for path in folder.glob("*/") if path.name in names and _images(path))


def _no_such_config(data: Dataset, root: Path) -> UserError:
    configs = sorted(path.name for path in root.iterdir() if path.is_dir() and _files(path))
    if configs:
        wanted = "needs a value" if data.config is None else "no such folder with data files"
        return UserError(f"{data.key}.config", data.config, f"{wanted} in {root}", f"It has: {', '.join(configs)}.")
    if data.config and _files(root):
        problem = f"{root} has data files, but no such subfolder"
        return UserError(f"{data.key}.config", data.config, problem, f"{data.key}.config=null")
    problem = f"no data files ({', '.join(READERS)}) in this folder"
    remedy = "Name them train.csv, validation.csv and so on, or put images into train/<class>/."
    return UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
