"""Reading the rows of a split, and their fingerprint. Nothing here knows what a label means."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distill_runner.errors import UserError, brief
from distill_runner.hub import why_unreachable
from distill_runner.tasks.folders import READERS, local_copies, locate, missing_split, split_files
from distill_runner.tasks.task import EMBEDDED, Task, is_embedded


@dataclass(frozen=True)
class Table:
    """The task's columns of one split, as the data holds them.

    Attributes:
        columns: name -> values; the label's is absent in a test split that has none.
        class_names: names that the data itself gives the values of the label column, if any.
    """

    columns: dict[str, list[Any]]
    class_names: list[str] | None


def fingerprint(task: Task) -> str:
    """A hash of what the task reads; equal for equal content, wherever a folder lies.

    Local files: over names and bytes of the files of the splits in use. Hub: the id and revision, taken on
    trust. Embedded: over the text, which may differ between versions of Python.

    Raises:
        UserError: a folder, a configuration or a split's files are absent.
    """
    if is_embedded(task):
        from distill_runner.corpora import embedded_fingerprint

        return f"{task.dataset}:{embedded_fingerprint()}"
    folder = locate(task)
    if folder is None:
        return f"hub:{task.dataset}@{task.revision or 'main'}"
    total = hashlib.sha256()
    for split in sorted({task.train, *task.validation.values(), *task.test.values()}):
        for file in split_files(folder, split, task):
            status = file.stat()
            digest = _digest(str(file), status.st_size, status.st_mtime_ns)
            total.update(f"{split}\0{file.relative_to(folder).as_posix()}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()}"


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """sha256 of a file; size and time are arguments so that a changed file is hashed anew."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(task: Task, split: str) -> Table:
    """The task's columns of a split.

    Raises:
        UserError: files, split or columns are absent, damaged or empty, or the hub cannot be reached.
    """
    if is_embedded(task):
        return _read_embedded(task, split)
    folder = locate(task)
    # The cache of ``datasets`` knows a file by path and time, which may be equal for different content
    # (archives often set one time for all their files); a temporary cache cannot be stale.
    with _quiet(), TemporaryDirectory() as cache:
        data = _from_hub(task, split) if folder is None else _from_files(task, split, folder, cache)
        _check_columns(task, split, data.column_names)
        if not len(data):
            raise _empty(task, split, folder or task.dataset)
        wanted = [name for name in data.column_names if name in (*task.columns, task.label)]
        columns = data.select_columns(wanted).to_dict()
    return Table(columns, getattr(data.features.get(task.label), "names", None))


def _read_embedded(task: Task, split: str) -> Table:
    """A demo task under the column names of GLUE: ``sentence``, or ``sentence1`` and ``sentence2``."""
    from distill_runner import corpora

    name = task.dataset.removeprefix(EMBEDDED)
    splits = corpora.demo_task(name)
    if split not in splits:
        raise missing_split(task, split, list(splits), task.dataset)
    texts, labels = splits[split].texts, splits[split].labels
    columns: dict[str, list[Any]] = (
        {"sentence": texts[0]} if len(texts) == 1 else {"sentence1": texts[0], "sentence2": texts[1]}
    )
    columns["label"] = [] if labels is None else labels.tolist()
    _check_columns(task, split, list(columns))
    return Table(columns, corpora.PAIR_LABELS if name == "pairs" else corpora.SENTENCE_LABELS)


def _check_columns(task: Task, split: str, available: list[str]) -> None:
    remedy = f"It has: {', '.join(available)}."
    for column in task.columns:
        if column not in available:
            problem = f"split '{split}' of {task.dataset} has no column '{column}'"
            raise UserError("task.columns", f"[{','.join(task.columns)}]", problem, remedy)
    if task.label not in available and not task.is_test(split):
        problem = f"split '{split}' of {task.dataset} has no such column"
        raise UserError("task.label", task.label, problem, remedy)


def _from_files(task: Task, split: str, folder: Path, cache: str) -> Any:
    files = split_files(folder, split, task)
    reader, options = READERS[files[0].suffix]
    names = [str(file) for file in files]
    try:
        return _load(True, reader, data_files=names, split="train", cache_dir=cache, **options)
    except Exception as error:
        if "corresponds to no data" in str(error) or not any(file.stat().st_size for file in files):
            raise _empty(task, split, folder) from error
        shown = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        problem = f"cannot read {shown} in {folder}: {brief(error)}"
        remedy = "The file is damaged, incomplete or not what its name says: fetch or write it again."
        raise UserError(task.role(split), split, problem, remedy) from error


def _from_hub(task: Task, split: str) -> Any:
    problem = why_unreachable("dataset", task.dataset, task.revision)
    try:
        found = _load(problem is not None, task.dataset, task.config, revision=task.revision)
    except Exception as error:
        raise _hub_error(task, problem or brief(error)) from error
    if split not in found:
        raise missing_split(task, split, list(found), f"{task.dataset} on the hub")
    return found[split]


def _empty(task: Task, split: str, place: Path | str) -> UserError:
    return UserError(task.role(split), split, f"the split is empty in {place}", "Fetch or write it again.")


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


def _hub_error(task: Task, problem: str) -> UserError:
    files = f"{task.config}/" if task.config else "its files"
    if copies := local_copies(task):
        problem = f"{copies[0]} (DISTILL_DATA_DIR) has no {files}, and {problem}"
    name = task.dataset.rpartition("/")[2]
    remedy = f"task.dataset=<folder with {files}>, or set DISTILL_DATA_DIR to a folder with {name}/"
    return UserError("task.dataset", task.dataset, problem, remedy)


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
