"""Columns of the data: which are the texts and the label if the user does not say so, and which give labels away."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.readers.table import DIGITS, TEXT
from distill_runner.datasets.readers.tables import listed_names

LABEL = "label"
"""Default name of the label column."""
LABELS = frozenset((LABEL, "labels", "class", "category", "target", "score", "rating", "stars", "sentiment", "intent"))
"""Names that identify the label column if there is no column with the default name."""
LABEL_WORDS = LABELS | {"classes", "categories", "gold", "targets", "annotation", "annotator", "y"}
"""Words in the names of columns that may hold the label in another form, such as ``label_text``."""
KEYS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "url", "date"])
"""Names of columns that are not taken for texts, such as identifiers and dates."""
_KEY = re.compile(r".*(_id|_ids|[a-z]ID|_idx|_index|_url)|__index_level_\d+__|Unnamed: \d+")
TEXTS = frozenset(("text", "sentence", "review", "content", "body", "document", "tweet", "comment", "message", "title"))
"""Names of columns that are texts even if all of them are numbers."""
PAIRS = (
    ("premise", "hypothesis"),
    ("question", "answer"),
    ("question", "context"),
    ("question", "passage"),
    ("question", "paragraph"),
    ("question", "document"),
    ("question", "sentence"),
    ("question", "text"),
    ("query", "passage"),
    ("query", "document"),
    ("claim", "evidence"),
    ("text", "text_pair"),
    ("first", "second"),
)
"""Names of columns that are read as two texts; so are names that differ in 1 and 2, or a and b, at their end."""
MIN_ROWS = 8
"""Rows from which columns are searched for the label."""
MAX_CANDIDATES = 20


def infer_label(label_columns: list[str], names: Iterable[str]) -> list[str]:
    """Return the label columns: those that are set, or the only synonym of the default name.

    Raises:
        UserError: a column does not exist, or several columns could be the label.
    """
    names = list(names)
    if missing := [name for name in label_columns if name not in names]:
        synonyms = [name for name in names if name.casefold() in LABELS]
        if label_columns == [LABEL] and len(synonyms) == 1:
            return synonyms
        problem = f"no such column: the data have {listed_names(names)}"
        remedy = "task.label=<column of the labels>"
        if label_columns == [LABEL] and synonyms:
            problem, remedy = f"could be {' or '.join(synonyms)}", f"task.label={synonyms[0]}, or another column"
        raise UserError("task.label", missing[0], problem, remedy)
    return label_columns


def text_candidates(types: Mapping[str, str], excluded: Iterable[str]) -> list[str]:
    """Return the columns that may be texts: those of text that are not identifiers, or else one named like a text."""
    names = [name for name in types if name not in {*excluded} and not is_key(name)]
    texts = [name for name in names if types[name] == TEXT]
    return texts or [name for name in names if types[name] == DIGITS and name.casefold() in TEXTS]


def is_key(name: str) -> bool:
    """Return whether a column is named like an identifier of its row."""
    return name.casefold() in KEYS or _KEY.fullmatch(name) is not None


def has_label_word(name: str) -> bool:
    """Return whether a column is named like a form of the label."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).casefold())
    return not LABEL_WORDS.isdisjoint(words)


def as_pair(names: Sequence[str]) -> list[str] | None:
    """Return two names in the order of a known pair; None if they are no pair."""
    if len(names) != 2:
        return None
    for first, second in (names, names[::-1]):
        if (first.casefold(), second.casefold()) in PAIRS:
            return [first, second]
        if len(first) > 1 and first[:-1] == second[:-1] and first[-1] + second[-1] in ("12", "ab", "AB"):
            return [first, second]
    return None


def infer_texts(candidates: Sequence[str], columns: Mapping[str, list[Any]], labels: Sequence[Any]) -> list[str]:
    """Return the columns of texts among the candidates: the only one, or a known pair.

    A candidate that is named like a form of the label and gives it away, such as ``label_text``, is no text.

    Args:
        columns: values of the candidates.
        labels: value of the label in each row.
    Raises:
        UserError: more than one choice is possible; all are named.
    """
    leaks = {name for name in candidates if gives_away(columns[name], labels)}
    texts = [name for name in candidates if name not in leaks or not has_label_word(name)]
    pair = as_pair(texts)
    if pair is not None and len(leaks & {*pair}) != 1:
        return pair
    if len(texts) == 1:
        return texts
    options = texts or list(candidates)
    problem = (
        f"could be {listed_names(options[:-1])} or {options[-1]}" if len(options) > 1 else f"could be {options[0]}"
    )
    if leaks & {*options}:
        problem += f"; {listed_names(sorted(leaks & {*options}))} gives the label away"
    elif len(options) == 2:
        problem += ", or both: they are not named as a pair, such as sentence1 and sentence2"
    usable = [name for name in options if name not in leaks] or options
    remedy = f"'task.columns={format_list(usable[:1])}'"
    if len(options) > 1:
        remedy += f", or two of them: 'task.columns={format_list(options[:2])}'"
    raise UserError("task.columns", None, problem, remedy)


def gives_away(values: Sequence[Any], labels: Sequence[Any]) -> bool:
    """Return whether a column of few values determines the label: each value, often repeated, has one label only."""
    first: dict[Any, Any] = {}
    for value, label in zip(values, labels, strict=True):
        if value is not None and first.setdefault(value, label) != label:
            return False
    return len(values) >= MIN_ROWS and 2 * len(first) <= len(values) and len(set(map(str, first.values()))) > 1


def predictability(values: Iterable[Any], labels: Iterable[Any]) -> tuple[int, float, float]:
    """Return how well the most frequent label of each value predicts the label.

    Returns:
        Number of different values, share of rows whose label is predicted, and share without knowing the value.
    """
    by_value: dict[Any, Counter[Any]] = defaultdict(Counter)
    for value, label in zip(values, labels, strict=True):
        by_value[value][label] += 1
    total = sum((counts for counts in by_value.values()), Counter[Any]())
    count = total.total()
    predicted = sum(max(counts.values()) for counts in by_value.values())
    return len(by_value), predicted / count, max(total.values()) / count
