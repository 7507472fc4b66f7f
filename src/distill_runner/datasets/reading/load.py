"""Loading of splits with ``datasets``, from local files or from the hub."""

import csv
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.datasets.reading import hub
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.folders import READERS, missing_split, split_files
from distill_runner.datasets.reading.split_table import damaged, empty

log = logging.getLogger(__name__)

LARGE = 10_000_000
"""Size in bytes above which reading takes a while and is logged."""


def from_files(data: Dataset, split: str, folder: Path, **how: Any) -> Any:
    files = split_files(folder, split, data)
    reader, options = READERS[files[0].suffix]
    if files[0].suffix == ".csv":
        options = options | {"sep": _separator(files[0])}
    if reader == "csv":
        for file in files:
            _require_names(data, file, options["sep"], options.get("quoting", csv.QUOTE_MINIMAL))
    names = [str(file) for file in files]
    try:
        return _load(True, reader, data_files=names, split="train", **how, **options)
    except Exception as error:
        if "corresponds to no data" in str(error) or not any(file.stat().st_size for file in files):
            raise empty(data, split, folder) from error
        raise damaged(data, split, folder, error) from error


def _separator(file: Path) -> str:
    """Return the separator of a CSV file: a comma, unless its first line has no comma but another separator."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        head = lines.readline()
    others = [sign for sign in (";", "\t", "|") if sign in head]
    return others[0] if others and "," not in head else ","


def _require_names(data: Dataset, file: Path, separator: str, quoting: Any) -> None:
    """Check that the first row has no more fields than the header: pandas would take the first field for an index.

    Raises:
        UserError: the row has more fields.
    """
    with file.open(encoding="utf-8", errors="replace", newline="") as lines, suppress(csv.Error):
        rows = csv.reader(lines, delimiter=separator, quoting=quoting)
        header, first = next(rows, []), next(rows, [])
        if len(first) > len(header):
            problem = f"{file.name} names {len(header)} columns, but its first row has {len(first)} fields"
            remedy = f"Quote texts that contain {separator!r}, or name every column in the first line."
            raise UserError(f"{data.key}.dataset", data.dataset, problem, remedy)


def from_hub(data: Dataset, split: str, place: Path, **how: Any) -> Any:
    """Return a split of a data set on the hub, read from links to its files in ``place``."""
    view = hub.fetched(data, split, place)
    if (size := sum(file.stat().st_size for file in view.rglob("*"))) > LARGE:
        log.info("reading %s of %s: %.0f MB", split, " ".join(filter(None, (data.dataset, data.config))), size / 1e6)
    try:
        found = _load(True, str(view), data.config, verification_mode="no_checks", **how)
    except Exception as error:
        raise damaged(data, split, f"{data.dataset} of the hub", error) from error
    if split not in found:
        raise missing_split(data, split, list(found), f"{data.dataset} on the hub")
    return found[split]


def streamed(data: Dataset, split: str) -> Any:
    """Return a split of a data set on the hub that is read while it is iterated over."""
    commit = hub.commit(data)
    try:
        found = _load(False, commit.name, data.config, revision=commit.sha, streaming=True)
    except Exception as error:
        raise damaged(data, split, f"{data.dataset} of the hub", error) from error
    if split not in found:
        raise missing_split(data, split, list(found), f"{data.dataset} on the hub")
    return found[split]


def _load(offline: bool, *args: Any, **options: Any) -> Any:
    """Call ``load_dataset``; with ``offline``, without any request to the hub.

    Otherwise ``load_dataset`` asks the hub even for local files (to count the uses of a format), and waits for it.
    """
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        return datasets.load_dataset(*args, **options)
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and log lines of ``datasets`` on standard error; the callers report its errors."""
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
