"""Reading the rows of a split, and their fingerprint. Nothing here knows what a label means."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pydantic import Field

from distill_runner.common.errors import UserError, as_list, brief
from distill_runner.datasets.reading import hub
from distill_runner.datasets.reading.dataset import EMBEDDED, Dataset, is_embedded
from distill_runner.datasets.reading.folders import IMAGES, READERS, local_data, missing_split, split_files
from distill_runner.datasets.reading.slices import parse

log = logging.getLogger(__name__)

LARGE = 10_000_000
"""Bytes that are not read in a moment."""


AnyDataset = TypeVar("AnyDataset", bound=Dataset)


@dataclass(frozen=True)
class SplitTable:
    """The columns of one split that are asked for, as the data holds them.

    Attributes:
        columns: name -> values; the label's is absent in a test split that has none.
        class_names: names that the data itself gives the values of the label column, if any.
    """

    columns: dict[str, list[Any]]
    class_names: list[str] | None


def data_fingerprint(data: Dataset) -> str:
    """A hash of what can be read; equal for equal content, wherever a folder lies.

    Local files: over names and bytes of the files of the splits in use. Hub: the commit and the configuration.
    Embedded: over the text, which may differ between versions of Python.

    Raises:
        UserError: a folder, a configuration or a split's files are absent.
    """
    own = [split for split in data.splits if data.placed(split)[0] is data]
    others = sorted(data.splits - set(own))
    parts = [_fingerprint(data, own)] if own else []
    for split in others:
        with _at(data, split) as (where, name):
            parts.append(f"{split}={_fingerprint(where, [name])}")
    return "+".join(parts)


@contextmanager
def _at(data: AnyDataset, split: str) -> Iterator[tuple[AnyDataset, str]]:
    """Where a split lies; an error about another data set or configuration than the task's is one of the split."""
    where, name = data.placed(split)
    try:
        yield where, name
    except UserError as error:
        if where is data or error.key not in (f"{data.key}.dataset", f"{data.key}.config"):
            raise
        raise UserError(data.role(split), split, error.problem, error.remedy) from error


def _fingerprint(data: Dataset, splits: Iterable[str]) -> str:
    if is_embedded(data):
        from distill_runner.datasets.embedded import embedded_fingerprint
        from distill_runner.datasets.images.digits import digits_fingerprint

        of_images = data.dataset == f"{EMBEDDED}digits"
        return f"{data.dataset}:{digits_fingerprint() if of_images else embedded_fingerprint()}"
    folder = local_data(data)
    if folder is None:
        return f"hub:{hub.commit(data).sha}/{data.config or ''}"
    total = hashlib.sha256()
    for split in sorted({parse(split)[0] for split in splits}):
        for file in split_files(folder, split, data):
            status = file.stat()
            digest = _digest(str(file), status.st_size, status.st_mtime_ns)
            where = file.name if file == folder else file.relative_to(folder).as_posix()
            total.update(f"{split}\0{where}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()}"


def on_hub(data: Dataset) -> str | None:
    """The commit that is read of data on the hub."""
    return None if is_embedded(data) or local_data(data) else hub.commit(data).sha


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """sha256 of a file; size and time are arguments so that a changed file is hashed anew."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(data: Dataset, split: str) -> SplitTable:
    """The data's columns of a split.

    Raises:
        UserError: files, split or columns are absent, damaged or empty, or the hub cannot be reached.
    """
    with _at(data, split) as (where, name):
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
    if is_embedded(data):
        return _read_embedded(data, split)
    folder = local_data(data)
    if folder is not None and (files := split_files(folder, split, data))[0].suffix.lower() in IMAGES:
        return _image_files(data, split, files)
    # The cache of ``datasets`` knows a file by path and time, which may be equal for different content
    # (archives often set one time for all their files); a temporary cache cannot be stale.
    with _quiet(), TemporaryDirectory() as cache:
        if folder is None:
            found = _from_hub(data, split, Path(cache, "view"), cache_dir=cache)
        else:
            found = _from_files(data, split, folder, cache_dir=cache)
        _check_columns(data, split, found.column_names)
        if not len(found):
            raise _empty(data, split, folder or data.dataset)
        asked = {*data.needed(split), *data.label_columns}
        columns = found.select_columns([name for name in found.column_names if name in asked]).to_dict()
        labels = found.features.get(next(iter(data.label_columns), None))
    return SplitTable(columns, getattr(getattr(labels, "feature", labels), "names", None))  # of a list, or of a value


def rows(data: Dataset, split: str, stream: bool = False) -> Iterator[dict[str, Any]]:
    """The same row by row, in little memory.

    Args:
        stream: read from the hub while iterating, without a copy on disk; files are always read so.
    Raises:
        UserError: as ``read``, with the first row or when a damaged place is reached.
    """
    with _at(data, split) as (where, name):
        yield from _rows(where, name, stream)


def _rows(data: Dataset, split: str, stream: bool) -> Iterator[dict[str, Any]]:
    if is_embedded(data):
        columns = _read_embedded(data, split).columns
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return
    folder, number = local_data(data), 0
    with _quiet(), TemporaryDirectory() as place:
        if folder is not None:
            found = _from_files(data, split, folder, streaming=True)
        elif stream:
            found = _streamed(data, split)
        else:
            found = _from_hub(data, split, Path(place), streaming=True)
        try:
            for number, row in enumerate(found, start=1):
                if number == 1:
                    _check_columns(data, split, list(row))
                yield row
        except (OSError, ValueError) as error:
            raise _damaged(data, split, folder or data.dataset, error) from error
    if not number:
        raise _empty(data, split, folder or data.dataset)


def _read_embedded(data: Dataset, split: str) -> SplitTable:
    """A demo task under the column names of GLUE (``sentence``, or ``sentence1`` and ``sentence2``), or the text."""
    from distill_runner.datasets import embedded

    name = data.dataset.removeprefix(EMBEDDED)
    other = {"text": _embedded_text, "digits": _embedded_digits, "questions": _embedded_questions}
    if name in other:
        return other[name](data, split)
    splits = embedded.demo_task(name)
    if split not in splits:
        raise missing_split(data, split, list(splits), data.dataset)
    texts, labels = splits[split].texts, splits[split].labels
    columns: dict[str, list[Any]] = (
        {"sentence": texts[0]} if len(texts) == 1 else {"sentence1": texts[0], "sentence2": texts[1]}
    )
    columns["label"] = [] if labels is None else labels.tolist()
    _check_columns(data, split, list(columns))
    return SplitTable(columns, embedded.PAIR_LABELS if name == "pairs" else embedded.SENTENCE_LABELS)


def _embedded_text(data: Dataset, split: str) -> SplitTable:
    """Passages in the column ``text``, their subject in ``topic``."""
    from distill_runner.datasets.embedded import SPLITS, embedded_passages, topic_split

    if split not in SPLITS:
        raise missing_split(data, split, list(SPLITS), data.dataset)
    topics = {topic: texts for topic, texts in embedded_passages().items() if topic_split(topic) == split}
    columns = {
        "text": [text for texts in topics.values() for text in texts],
        "topic": [topic for topic, texts in topics.items() for _ in texts],
    }
    _check_columns(data, split, list(columns))
    return SplitTable(columns, None)


def _embedded_digits(data: Dataset, split: str) -> SplitTable:
    """Grey images of 8 x 8 in the column ``image``, their digit in ``label``."""
    from distill_runner.datasets.images.digits import as_png

    splits = as_png()
    if split not in splits:
        raise missing_split(data, split, list(splits), data.dataset)
    images, labels = splits[split]
    columns: dict[str, list[Any]] = {"image": images, "label": labels}
    _check_columns(data, split, list(columns))
    return SplitTable(columns, [str(digit) for digit in range(10)])


def _image_files(data: Dataset, split: str, files: list[Path]) -> SplitTable:
    """Files in the column ``image``, the number of their folder among those of the split in ``label``."""
    names = sorted({file.parent.name for file in files})
    number = {name: place for place, name in enumerate(names)}
    columns: dict[str, list[Any]] = {"image": list(files), "label": [number[file.parent.name] for file in files]}
    _check_columns(data, split, list(columns))
    return SplitTable(columns, names)


def _embedded_questions(data: Dataset, split: str) -> SplitTable:
    """Questions in SQuAD's columns."""
    from distill_runner.datasets.embedded import SPLITS
    from distill_runner.datasets.embedded_questions import question_rows

    if split not in SPLITS:
        raise missing_split(data, split, list(SPLITS), data.dataset)
    rows = question_rows(split)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    _check_columns(data, split, list(columns))
    return SplitTable(columns, None)


def _check_columns(data: Dataset, split: str, available: list[str]) -> None:
    for column, field in data.needed(split).items():
        if column not in available:
            problem = f"split '{split}' of {data.dataset} has no column '{column}'"
            value = as_list(data.columns) if field == "columns" else column
            raise UserError(f"{data.key}.{field}", value, problem, f"It has: {', '.join(available)}.")


def _from_files(data: Dataset, split: str, folder: Path, **how: Any) -> Any:
    files = split_files(folder, split, data)
    reader, options = READERS[files[0].suffix]
    if files[0].suffix == ".csv":
        options = options | {"sep": _separator(files[0])}
    names = [str(file) for file in files]
    try:
        return _load(True, reader, data_files=names, split="train", **how, **options)
    except Exception as error:
        if "corresponds to no data" in str(error) or not any(file.stat().st_size for file in files):
            raise _empty(data, split, folder) from error
        raise _damaged(data, split, folder, error) from error


def _separator(file: Path) -> str:
    """What divides the columns of a CSV file: a comma, unless its first line has none and has others."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        head = lines.readline()
    others = [sign for sign in (";", "\t", "|") if sign in head]
    return others[0] if others and "," not in head else ","


class _AnyColumns(Dataset):
    """The same rows, whatever their columns."""

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
    """The columns of a split, each with whether it holds texts.

    Raises:
        UserError: as ``read``.
    """
    place = {"dataset": data.dataset, "config": data.config, "revision": data.revision}
    first = next(iter(_rows(_AnyColumns(**place, of=data), parse(split)[0], False)))
    return {name: isinstance(value, str) for name, value in first.items()}


def _damaged(data: Dataset, split: str, place: Path | str, error: Exception) -> UserError:
    shown = ""
    if isinstance(place, Path):
        files = split_files(place, split, data)
        shown = ", ".join(file.name for file in files[:3]) + (", ..., in " if len(files) > 3 else " in ")
    remedy = "The file is damaged, incomplete or not what its name says: fetch or write it again."
    return UserError(data.role(split), split, f"cannot read {shown}{place}: {brief(error)}", remedy)


def _from_hub(data: Dataset, split: str, place: Path, **how: Any) -> Any:
    """A split of the data set on the hub, its files laid out in ``place``."""
    view = hub.fetched(data, split, place)
    if (size := sum(file.stat().st_size for file in view.rglob("*"))) > LARGE:
        log.info("reading %s of %s: %.0f MB", split, " ".join(filter(None, (data.dataset, data.config))), size / 1e6)
    try:
        found = _load(True, str(view), data.config, verification_mode="no_checks", **how)
    except Exception as error:
        raise _damaged(data, split, f"{data.dataset} of the hub", error) from error
    if split not in found:
        raise missing_split(data, split, list(found), f"{data.dataset} on the hub")
    return found[split]


def _streamed(data: Dataset, split: str) -> Any:
    """A split of the data set on the hub, read while it is iterated over."""
    commit = hub.commit(data)
    try:
        found = _load(False, commit.name, data.config, revision=commit.sha, streaming=True)
    except Exception as error:
        raise _damaged(data, split, f"{data.dataset} of the hub", error) from error
    if split not in found:
        raise missing_split(data, split, list(found), f"{data.dataset} on the hub")
    return found[split]


def _empty(data: Dataset, split: str, place: Path | str) -> UserError:
    return UserError(data.role(split), split, f"the split is empty in {place}", "Fetch or write it again.")


def _load(offline: bool, *args: Any, **options: Any) -> Any:
    """``load_dataset``; ``offline`` without a request: from files, or the copy of an earlier download.

    It would ask the hub even for local files (to count the uses of a format), and wait for an answer.
    """
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        return datasets.load_dataset(*args, **options)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines of ``datasets`` on standard error: its errors become ours."""
    import datasets
    from huggingface_hub import utils as hub

    with ExitStack() as restore:
        for bars in (datasets.utils, hub):
            if not bars.are_progress_bars_disabled():
                bars.disable_progress_bars()
                restore.callback(bars.enable_progress_bars)
        restore.callback(datasets.utils.logging.set_verbosity, datasets.utils.logging.get_verbosity())
        datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
        yield
