"""Data files on this machine: where a dataset is, and which files a split has."""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from distill_runner.common.errors import UserError, override, similar_file
from distill_runner.common.files import typed_path
from distill_runner.datasets.readers import formats
from distill_runner.datasets.readers.dataset import ALL_FILES, Dataset, is_embedded
from distill_runner.datasets.readers.table import FileProblem
from distill_runner.datasets.readers.text_files import COMPRESSIONS

_SYNONYMS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing"))
_SHARD = re.compile(r"-(?P<number>\d+)-of-(?P<count>\d+)$")


def _stem(path: Path) -> str:
    """Return the name of a file of data without its extensions."""
    return (Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path).stem


def local_data(data: Dataset) -> Path | None:
    """Return the folder of the data files, or a single data file; ``None`` for the hub and for embedded data.

    The path ``dataset`` is tried first, then the hub id below ``DISTILL_DATA_DIR``, by its full or its last name. If a
    folder there lacks the configuration, the hub is used.

    Raises:
        UserError: the folder does not exist or lacks the configuration, or the file has another format.
    """
    if is_embedded(data):
        return None
    key = f"{data.key}.dataset"
    if not data.dataset.strip():
        raise UserError(key, data.dataset, "is empty", "Give a folder, or a hub id: nyu-mll/glue")
    path = typed_path(data.dataset)
    try:
        if path.is_file():
            formats.require_format(key, path)
            return path
        for root in [path] if path.is_dir() else local_copies(data):
            folder = root / data.config if data.config else root
            is_saved = (folder / "state.json").is_file() or any(folder.glob("*/state.json"))
            if is_saved or _data_files(folder) or _split_folders(folder):
                return folder
        if path.is_dir():
            raise _no_such_config(data, path)
    except OSError as error:
        raise UserError(key, data.dataset, f"cannot be listed: {error}", "Allow reading this folder.") from error
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", data.dataset):
        if similar := similar_file(path):
            remedy = "Did you mean " + override(key, str(similar)) + "?"
            raise UserError(key, data.dataset, "no such file or folder", remedy)
        remedy = override(key, "<folder with train.csv, validation.csv and so on>") + ", or a hub id: nyu-mll/glue"
        raise UserError(key, data.dataset, "no such folder", remedy)
    return None


def local_copies(data: Dataset) -> list[Path]:
    """Return the folders below ``DISTILL_DATA_DIR`` that have the full or last name of the dataset."""
    if not (root := os.environ.get("DISTILL_DATA_DIR")):
        return []
    names = dict.fromkeys((data.dataset, data.dataset.rpartition("/")[2]))
    return [folder for name in names if (folder := typed_path(root) / name).is_dir()]


def split_files(folder: Path, split: str, data: Dataset) -> list[Path]:
    """Return the files of a split, named ``<split>.<ext>`` or ``<split>-*.<ext>``.

    Without such files, synonyms are tried (``dev.csv``), and folders of arrow files or images. ``*`` takes all files,
    and another pattern those that it matches, in subfolders too: ``2024-*``, ``*/part-*.jsonl.gz``.
    A single file as ``folder`` is the split ``train``.

    Raises:
        UserError: there is no file of the split; more than one file could be the split; or a part of it is missing.
    """
    if folder.is_file():
        if split == "train":
            return [folder]
        raise missing_split(data, split, ["train"], f"{folder.name}, which is one file")
    if matches := _matching_files(folder, split, data):
        return matches
    names = next((names for names in _SYNONYMS if split in names), (split,))
    for path in _entries(folder):
        if path.suffix.lower() in formats.OTHER_FORMATS and _SHARD.sub("", path.name.partition(".")[0]) in names:
            problem = f"{path.name} in {folder} is of a format that is not read"
            raise UserError(data.split_key(split), split, problem, formats.OTHER_FORMATS[path.suffix.lower()])
    available = sorted({_SHARD.sub("", _stem(file)) for file in _data_files(folder)} | set(_split_folders(folder)))
    raise missing_split(data, split, available, str(folder))


def has_local_split(data: Dataset, split: str) -> bool:
    """Return whether the folder of ``data`` has files of a split; False for data that are not in a folder.

    Raises:
        UserError: more than one file could be the split.
    """
    try:
        folder = local_data(data)
    except UserError:  # raised again when the data are read
        return False
    return folder is not None and folder.is_dir() and bool(_matching_files(folder, split, data))


def _matching_files(folder: Path, split: str, data: Dataset) -> list[Path]:
    """Return the files of a split in a folder, as ``split_files`` does; empty if there are none."""
    if split == "train" and (folder / "state.json").is_file():
        return _arrow_files(folder)
    if files := _files_of(folder, split, data, split):
        return files
    synonyms = next((names for names in _SYNONYMS if split in names), ())
    matches = [files for name in synonyms if name != split and (files := _files_of(folder, name, data, split))]
    if len(matches) > 1:
        raise _ambiguous(data, split, f"could be {' or '.join(files[0].name for files in matches)} in {folder}")
    return matches[0] if matches else []


def _files_of(folder: Path, name: str, data: Dataset, split: str) -> list[Path]:
    """Return the files with the name of a split, in any letter case unless there are files in its own.

    Raises:
        UserError: they are not one split: in one folder, of one format, and either one file or all of its parts.
    """
    files, is_pattern = _data_files(folder), bool(set("*?") & set(name))

    if name == ALL_FILES:
        matches = files
    elif is_pattern and "/" in name:
        paths = (path for path in folder.glob(name.lstrip("/")) if formats.file_format(path))
        matches = sorted(p for p in paths if not re.search(r"(^|/)\.[^./]", p.relative_to(folder).as_posix()))
    elif is_pattern:
        matches = [file for file in files if fnmatchcase(file.name, name) or fnmatchcase(_stem(file), name)]
    else:
        beginning = f"{name}-"  # of train-00000-of-00002, and of train with a hyphen
        matches = [file for file in files if f"{_stem(file)}-".startswith(beginning)]
        matches = matches or [file for file in files if f"{_stem(file)}-".casefold().startswith(beginning.casefold())]
    if not matches and (own := _arrow_files(folder / name) or _checked(_image_entries(folder / name), data, split)):
        return own
    matches += [] if is_pattern else _files_of_split(folder / name)
    shards = [shard for file in matches if (shard := _SHARD.search(_stem(file)))]
    counts, numbers = {int(shard["count"]) for shard in shards}, {int(shard["number"]) for shard in shards}
    has_whole = any(_stem(file).casefold() == name.casefold() for file in matches)
    has_backup = has_whole or len(shards) not in (0, len(matches)) or len(counts) > 1
    has_formats = len({file.name[len(_stem(file)) :].lower() for file in matches}) > 1
    if has_formats or (not is_pattern and len(matches) > 1 and (has_backup or len({f.parent for f in matches}) > 1)):
        names = [file.relative_to(folder).as_posix() for file in matches[:4]]
        raise _ambiguous(data, split, f"could be {', '.join(names)} in {folder}")
    if not is_pattern and counts and len(numbers) < max(counts):
        problem = f"has {len(numbers)} of the {max(counts)} parts that its files count, in {matches[0].parent}"
        raise UserError(data.split_key(split), split, problem, "Download the other parts.")
    return _checked(matches, data, split)


def _checked(files: list[Path], data: Dataset, split: str) -> list[Path]:
    """Return the files, and raise a ``UserError`` if something with the name of one is none."""
    for file in files:
        if not file.is_file():
            name = f"{file.parent.name}/{file.name}" if file.suffix.lower() in formats.IMAGE_FORMATS else file.name
            problem = f"{name} is a broken link, or not a file that can be read"
            raise UserError(data.split_key(split), split, problem, "Remove it, or write it again.")
    return files


def _ambiguous(data: Dataset, split: str, problem: str) -> UserError:
    return UserError(data.split_key(split), split, problem, "Keep one of them, of one format, or move the others.")


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted and without hidden names; nothing if it is not a folder."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []


def _data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder and of its subfolder ``data``, which the hub uses for data without a config.

    What has the name of such a file without being one is returned too, so that it is named instead of overlooked.
    """
    return sorted(path for place in (folder, folder / "data") for path in _entries(place) if formats.file_format(path))


def _files_of_split(folder: Path) -> list[Path]:
    """Return the data files of a split's folder, unless they are beside images, which they describe."""
    has_images = any(path.suffix.lower() in formats.IMAGE_FORMATS for path in _entries(folder))
    return [] if has_images else [path for path in _entries(folder) if formats.file_format(path)]


def _arrow_files(folder: Path) -> list[Path]:
    """Return the files that ``save_to_disk`` wrote, without the cached results of ``map`` and ``filter``."""
    files = (file for file in _entries(folder) if file.suffix == ".arrow")
    return [file for file in files if not file.name.startswith("cache-")]


def _image_entries(folder: Path) -> list[Path]:
    """Return the images of a split's folder, class by class."""
    classes = (path for path in _entries(folder) if path.is_dir())
    return [file for path in classes for file in _entries(path) if file.suffix.lower() in formats.IMAGE_FORMATS]


def _split_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders named like a split that contain files of data or folders of images."""
    names = {name for names in _SYNONYMS for name in names}
    own = [path for path in _entries(folder) if path.name in names]
    return [path.name for path in own if _image_entries(path) or _files_of_split(path)]


def unread_siblings(data: Dataset, names: Iterable[str]) -> list[str]:
    """Return the data files beside those with these names whose own names begin like one of them: train2.csv.

    There are none on the hub, nor if nothing was read from files.
    """
    read_names = {Path(name).name for name in names}
    folder = local_data(data) if read_names else None
    stems = tuple(_SHARD.sub("", name.partition(".")[0]).casefold() for name in read_names)
    files = [path.name for path in _entries(folder) if formats.file_format(path)] if folder else []
    return [name for name in files if name not in read_names and name.casefold().startswith(stems)]


def file_names(files: Sequence[Path]) -> str:
    """Return the names of the first files and of their folder, for messages."""
    return ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "") + f" in {files[0].parent}"


# Errors


def missing_split(data: Dataset, split: str, available: list[str], place: str) -> UserError:
    """Return the error for a missing split; its remedy is the override that changes or removes the split."""
    key = data.split_key(split)
    # Hydra merges `key={...}` into the existing mapping, so that only `~` removes an entry.
    remedy = "Leave it out: " + override(f"~{key}") if data.is_optional(split) else f"Set {key}"
    if available == ["train"] and (key == "task.validation.validation" or not data.is_optional(split)):
        remedy = "Take parts of it: " + override("task.train", "train[:90%]", key, "train[90%:]")
        if split == "validation" and "split_off" in type(data).model_fields:
            remedy = override("task.split_off", 0.1) + " takes a tenth of the rows for validation."
    if key.startswith("task.test."):
        remedy += ", or all test splits: " + override("task.test", None)
    return UserError(key, split, f"no such split in {place}", f"It has: {', '.join(available)}. " + remedy)


@contextmanager
def reading_errors(data: Dataset, split: str, origin: str) -> Iterator[None]:
    """Turn what can happen while files are read into errors for the user; each cause has its own words.

    Raises:
        UserError: the files cannot be read. Memory that ran out is not the files' fault and stays as it is.
    """
    try:
        yield
    except FileProblem as error:
        is_of_file = error.problem.startswith(("is ", "has ", "holds ", "names ", "may ", "cannot "))
        problem = f"{origin} {error.problem}" if is_of_file else f"cannot read {origin}: {error.problem}"
        raise UserError(data.split_key(split), split, problem, error.remedy) from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EIO, errno.ESTALE):
            raise
        problem, remedy = f"cannot read {origin}: {error.strerror}", "Allow reading it. Is its disk still there?"
        raise UserError(data.split_key(split), split, problem, remedy) from error


def _no_such_config(data: Dataset, root: Path) -> UserError:
    key = f"{data.key}.config"
    configs = [path.name for path in _entries(root) if path.is_dir() and _data_files(path)]
    if configs and "train" not in configs:
        problem = f"{'needs a value' if data.config is None else 'no such folder with data files'} in {root}"
        return UserError(key, data.config, problem, f"It has: {', '.join(configs)}.")
    if data.config and _data_files(root):
        return UserError(key, data.config, f"{root} has data files, but no such subfolder", override(key, None))
    others = [path for path in _entries(root) if path.suffix.lower() in formats.OTHER_FORMATS]
    problem = f"no data files ({formats.FORMAT_NAMES}) in this folder" + (f", only {others[0].name}" if others else "")
    remedy = "Name them train.csv, validation.csv and so on, or put images into train/<class>/."
    remedy = formats.OTHER_FORMATS[others[0].suffix.lower()] if others else remedy
    return UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
