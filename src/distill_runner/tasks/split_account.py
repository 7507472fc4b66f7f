"""What was taken from the data of a task: from each split, in a line, and what in it would surprise the user."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from distill_runner.common.errors import MAX_LISTED, quantity, short_list
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.near_copies import near_copies
from distill_runner.datasets.readers.dataset import parse_split
from distill_runner.datasets.readers.table import FileRecord, TableRecord
from distill_runner.tasks.columns import percent

MANY_BLANK, MANY_SHARED = 0.01, 0.01
"""Shares of texts without words, and of validation images in the training data that would surprise."""


@dataclass
class SplitAccount:
    """What was taken from the data of one split.

    Attributes:
        split: name of the split as the configuration writes it.
        origin: the data that the split is a part of, if it is not a folder of files.
        files: records of its files.
        rows_read: number of rows of the files, before a slice.
        rows: number of examples.
        texts, label: names of the columns.
        unread: names of the other columns.
        blank: number of examples without any text.
        unlabeled: number of rows that were left out because they have no label.
        counts: number of examples by class, the largest class first; empty for other labels.
        scores: smallest, mean and largest score of a regression task; empty for other labels.
        weights: smallest and largest weight of the examples, and their effective number; empty without weights.
        lengths: as ``length_counts`` returns them; empty for images.
        retokenized: number of texts, or windows of them, that have other tokens than before the vocabulary was
            trimmed, and number of all; empty if it was not.
        warnings: what in this split alone would surprise.
    """

    split: str
    origin: str = ""
    files: list[FileRecord] = field(default_factory=list)
    rows_read: int = 0
    rows: int = 0
    texts: list[str] = field(default_factory=list)
    label: str = ""
    unread: list[str] = field(default_factory=list)
    blank: int = 0
    unlabeled: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    lengths: dict[str, Any] = field(default_factory=dict)
    retokenized: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def account_of_tables(split: str, tables: Sequence[TableRecord], texts: list[str], label: list[str]) -> SplitAccount:
    """Return the account of a split as far as its reader knows it; a table that was read twice counts once."""
    by_origin = {table.origin: table for table in tables}
    files = [record for table in by_origin.values() for record in table.files]
    columns = dict.fromkeys(name for table in by_origin.values() for name in table.columns)
    rows = sum(table.rows for table in by_origin.values())
    return SplitAccount(
        split,
        "" if files else ", ".join(by_origin),
        files,
        rows,
        rows,
        texts,
        " + ".join(name for name in label if name in columns),
        [name for name in columns if name not in {*texts, *label}],
        unlabeled=sum(table.num_unlabeled for table in by_origin.values()),
    )


def effective_number(weights: np.ndarray) -> float:
    """Return the effective number of examples with these weights: (sum w)^2 / sum w^2 (Kish 1965, section 11.2)."""
    return float(weights.sum() ** 2 / np.square(weights).sum())


def example_hashes(images: Iterable[np.ndarray]) -> np.ndarray:
    """Return a hash (N,), uint64, of the pixels of each example, to find examples in two splits."""
    digests = [hashlib.blake2b(pixels.tobytes(), digest_size=8).digest() for pixels in images]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def length_counts(lengths: np.ndarray, cut: int, limit: int, is_sample: bool = False) -> dict[str, Any]:
    """Return the lengths of examples in numbers.

    Args:
        cut: number of examples that lost tokens, because they had more than ``limit``.
        is_sample: whether the examples are only the first ones of the split.
    """
    counts = {"examples": len(lengths), "median": int(np.median(lengths)), "longest": int(lengths.max())}
    return {**counts, "cut": int(cut), "limit": limit, **({"sample": True} if is_sample else {})}


# --- Lines


def data_line(
    accounts: Mapping[str, SplitAccount],
    hashes: Mapping[str, np.ndarray],
    unit: str,
    text_of: Callable[[str, int], str] = lambda split, row: f"example {row} of {split}",
) -> AccountLine:
    """Return the line on the splits of a task.

    Args:
        accounts, hashes: by the name of the split: ``train``, then those of validation and test splits.
        unit: what an example is: ``text`` or ``image``.
        text_of: shows an example of a split.
    """
    train = next(iter(accounts.values()))
    inputs = dict.fromkeys(filter(None, (" + ".join(train.texts), " + ".join([*accounts.values()][-1].texts))))
    parts = [short_list(_sources(accounts)), *([f"{unit} = {', evaluated on '.join(inputs)}"] if inputs else [])]
    if train.label:
        counts = [f"{name} {count:,}" for name, count in train.counts.items()]
        if train.scores:
            counts = [f"{train.scores[0]:g} to {train.scores[2]:g}, mean {train.scores[1]:.2f}"]
        elif len(counts) > MAX_LISTED:
            low, high = min(train.counts.values()), max(train.counts.values())
            counts = [f"{len(counts)} classes of {low:,} to {high:,}"]
        parts.append(f"label = {train.label}" + (f" ({', '.join(counts)})" if counts else ""))
    parts += [f"not read: {short_list(train.unread)}"] if train.unread else []
    details = {name: asdict(replace(account, lengths={})) for name, account in accounts.items()}
    warnings = [warning for account in accounts.values() for warning in account.warnings]
    warnings += _surprises(accounts, hashes, text_of)
    return AccountLine("data", "; ".join(parts), tuple(dict.fromkeys(warnings)), {"splits": details})


def _sources(accounts: Mapping[str, SplitAccount]) -> list[str]:
    """Return what was read of each file; splits of one file are listed together."""
    groups: dict[tuple[str, str], dict[str, SplitAccount]] = {}
    for name, account in accounts.items():
        source = account.files[0].name if account.files else f"{account.origin} {account.split}"
        if len(account.files) > 1:
            source += f" and {quantity(len(account.files) - 1, 'more file', ',')}"
        groups.setdefault((source, parse_split(account.split)[0]), {})[name] = account
    texts = []
    for (source, _), members in groups.items():
        account = next(iter(members.values()))
        remarks = list(dict.fromkeys(remark for record in account.files for remark in record.remarks))
        lines = sum(record.lines or 0 for record in account.files)
        if lines > account.rows_read + len(account.files):
            remarks.insert(0, f"{lines:,} lines")
        remarks += [f"{account.blank:,} without text"] if account.blank else []
        remarks += [f"{account.unlabeled:,} without a label left out"] if account.unlabeled else []
        text = f"{source} {quantity(account.rows_read, 'row', ',')}" + (f" ({', '.join(remarks)})" if remarks else "")
        if len(members) > 1 or account.rows != account.rows_read:
            text += f": {', '.join(f'{other.rows:,} for {name}' for name, other in members.items())}"
        texts.append(text)
    return texts


def _surprises(
    accounts: Mapping[str, SplitAccount], hashes: Mapping[str, np.ndarray], text_of: Callable[[str, int], str]
) -> Iterable[str]:
    """Yield what would surprise: examples without text, classes without examples, and examples in two splits."""
    train = next(iter(accounts.values())).counts
    for name, account in accounts.items():
        counts = account.counts.items()
        if missing := [label for label, count in counts if not count and (name == "train" or train.get(label))]:
            yield f"{name} has no example of {short_list(missing)}"
        if account.blank > MANY_BLANK * account.rows:
            yield f"{account.blank:,} of {account.rows:,} examples of {name} have no text"
        if name == "train" or not {name, "train"} <= hashes.keys():
            continue
        own, of_train = hashes[name], hashes["train"]
        total, copies = len(own), ""
        if own.ndim == 3:  # sketches of texts
            first, rows = near_copies(of_train, own)
            count, usual = len(np.unique(rows)), 0.0
            if count:
                pair = text_of(name, int(rows[0])), text_of("train", int(first[0]))
                copies = f", word for word or nearly: '{pair[0]}', '{pair[1]}'"
        else:
            count, usual = int(np.isin(own, of_train).sum()), MANY_SHARED * total
        if count > usual:
            share = f"{count:,} of {total:,} examples of {name} ({percent(count / total)})"
            yield f"{share} are in the training data too{copies}"


def lengths_line(accounts: Mapping[str, SplitAccount]) -> AccountLine | None:
    """Return the line on the lengths of a task's examples; None if they have none."""
    lengths = {name: account.lengths for name, account in accounts.items() if account.lengths}
    if "train" not in lengths:
        return None
    train, cut = lengths["train"], "none cut"
    if shares := [f"{name} {percent(own['cut'] / own['examples'])}" for name, own in lengths.items() if own["cut"]]:
        cut = f"longer than task.max_length={train['limit']} and cut: {', '.join(shares)}"
    median = f"over {train['limit']}" if 2 * train["cut"] > train["examples"] else str(train["median"])
    sampled = [name for name, own in lengths.items() if own.get("sample")]
    sample = f" (of the first {lengths[sampled[0]]['examples']:,} of {', '.join(sampled)})" if sampled else ""
    is_divided = "train" not in sampled and train["examples"] != accounts["train"].rows
    parts = f" in {train['examples']:,} windows or texts" if is_divided else ""
    return AccountLine("lengths", f"median {median} tokens{parts}, {cut}{sample}", details={"splits": lengths})
