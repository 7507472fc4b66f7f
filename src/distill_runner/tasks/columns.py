"""Columns of the data: which are the texts and the label if the user does not say so, and which give labels away."""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, listed_names, override
from distill_runner.datasets.readers.content import SplitTable, column_names, inspect_columns, read_columns
from distill_runner.datasets.readers.table import DIGITS, LIST, MAPPING, TEXT, is_missing

LABEL = "label"
"""Default name of the label column."""
LABELS = frozenset((LABEL, "labels", "class", "category", "target", "score", "rating", "stars", "sentiment", "intent"))
"""Names that identify the label column if there is no column with the default name."""
LABEL_WORDS = LABELS | {"classes", "categories", "gold", "targets", "annotation", "annotator", "y"}
"""Words in the names of columns that may hold the label in another form, such as ``label_text``."""
KEYS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "url", "date"])
"""Names of columns that are not taken for texts, such as identifiers and dates."""
_KEY = re.compile(r".*(_id|_ids|[a-z]ID|_idx|_index|_url)|__index_level_\d+__|Unnamed: \d+")
_TEXTS = frozenset(
    ("text", "sentence", "review", "content", "body", "document", "tweet", "comment", "message", "title")
)
"""Names of columns that are texts even if all of them are numbers."""
PAIRS = {
    "premise": ("hypothesis",),
    "question": ("answer", "context", "passage", "paragraph", "document", "sentence", "text"),
    "query": ("passage", "document"),
    "claim": ("evidence",),
    "text": ("text_pair",),
    "first": ("second",),
}
"""Names of columns that are read as two texts; so are names that differ in 1 and 2, or a and b, at their end."""
MIN_ROWS = 8
"""Rows from which columns are searched for the label."""
MAX_CANDIDATES = 20
FEW_VALUES = 10
"""A column has few values if each occurs this many times on average."""
PREDICTED, WORD_PREDICTED = 0.5, 0.95
"""Shares of a constant prediction's errors that a column of few values, or a word, avoids if it gives labels away."""
_WRITTEN_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
"""A number as programs write it; 007 and +1 are text."""
_ARRAY = re.compile(r"\barray\s*\(")
_TYPE = re.compile(r",\s*dtype=[^)\]]*(?=\))")
_WORD = re.compile(
    r"""(?P<value>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[+-]?(?:\w[\w.]*|\.\d+)(?:(?<=[eE])[+-]\d+)?)|(?P<mark>\S)"""
)


# --- Cells


def distinct(values: list[Any]) -> list[Any]:
    """Return the distinct values in their order; all of them if some are lists."""
    try:
        return list(dict.fromkeys(values))
    except TypeError:
        return values


def is_blank(value: Any) -> bool:
    """Return whether a cell of a table holds nothing, or only spaces."""
    return is_missing(value) or (isinstance(value, str) and not value.strip())


def numbers(cells: Iterable[Any]) -> np.ndarray:
    """Return cells as float64 (N,), NaN for those that hold no number that is finite in float32."""
    values = []
    for cell in cells:
        try:
            value = float(cell)
        except (TypeError, ValueError):
            value = np.nan
        values.append(value if abs(value) <= float(np.finfo(np.float32).max) else np.nan)
    return np.array(values, dtype=np.float64)


def typed_values(table: SplitTable, column: str) -> list[Any]:
    """Return a column of labels; the text of a format without types as numbers or as true and false, if all are."""
    values = table.columns.get(column, [])
    if not table.untyped:
        return values
    texts = {value for value in values if value.strip()}
    typed: dict[str, Any] = {}
    if all(map(_WRITTEN_NUMBER.fullmatch, texts)):
        typed = {text: float(text) if "." in text else int(text) for text in texts}
    elif {text.casefold() for text in texts} <= {"true", "false"}:
        typed = {text: text.casefold() == "true" for text in texts}
    return [typed.get(value, value) for value in values]


def as_int(value: Any) -> Any:
    """Return a float such as 3.0 as the int 3, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def printed_value(text: str) -> Any:
    """Return the list or mapping that ``text`` represents; None for any other text.

    numpy prints no commas: ``['a' 'b']`` are two labels. For Python, that is one text, ``ab``.
    """
    text = text.strip()
    if not (text.startswith(("[", "{")) and text.endswith(("]", "}"))):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    words, end = list[str](), None  # where a value has ended that a comma has to follow
    for word in _WORD.finditer(_ARRAY.sub("(", _TYPE.sub("", text))):
        if end is not None and (word["value"] or word["mark"] in "[{"):
            if word.start() == end:
                return None  # nothing divides two values; Python would join texts
            words.append(",")
        words.append(word[0])
        end = word.end() if word["value"] or word["mark"] in "]}" else None
    try:
        value = ast.literal_eval(" ".join(words))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list | dict) else None


def by_label(value: Any) -> Any:
    """Return the scores that a pipeline of transformers lists, by label; another value as it is."""
    is_listed = isinstance(value, list) and all(isinstance(x, dict) and x.keys() == {"label", "score"} for x in value)
    return {one["label"]: one["score"] for one in value} if is_listed else value


def as_lists(values: list[Any], kinds: Any = list) -> list[Any]:
    """Return the lists that a file of text holds as printed ones; the values as they are if one is none.

    Args:
        kinds: what else counts as a list, such as ``dict``.
    """
    lists = [printed_value(value) if isinstance(value, str) else value for value in values]
    return lists if all(isinstance(value, kinds) for value in lists) else values


# --- Texts and labels


def infer_columns(task: Any) -> dict[str, Any]:
    """Return the text columns and the label columns of a task's data, as fields.

    Raises:
        UserError: the data lack a label column or a column of texts, or there is more than one choice.
    """
    types = inspect_columns(task, task.inferred_from)
    of_labels = [*types] if task.labeled_split == task.train else column_names(task, task.labeled_split)
    labels = task.label_columns
    if task.gold != "none":
        labels = infer_label(labels, task.label_candidates(of_labels))
    others = [*task.prediction_columns, *([task.example_weight] if task.example_weight else [])]
    texts = text_candidates(types, [*labels, *others])
    if not texts or len(texts) > MAX_CANDIDATES:
        problem = f"cannot be inferred: the data have {listed_names(list(types))}"
        nested = [name for name, kind in types.items() if kind in (LIST, MAPPING)]
        remedy = f"Write a text that is inside of {nested[0]} into a column of its own." if nested else None
        raise UserError("task.columns", None, problem, remedy or override("task.columns", ["<text>"]))
    keys = [name for name, kind in types.items() if kind == TEXT and is_key(name)]
    if len(texts) > 1 or has_label_word(texts[0]) or keys:
        columns = read_columns(task, task.inferred_from, [*texts, *labels])
        label_columns = [columns[name] for name in labels if name in columns]
        rows = label_columns[0] if len(label_columns) == 1 else zip(*label_columns, strict=True)
        texts = infer_texts(texts, keys, columns, list(map(str, rows)) or [""] * len(columns[texts[0]]))
    return {"columns": texts, "label": labels[0] if isinstance(task.label, str) else labels}


def find_label(label_columns: list[str], names: Sequence[str]) -> list[str] | None:
    """Return the label columns: those that are set, or the only synonym of the default name; None if one is missing.

    Raises:
        UserError: several columns could be the label.
    """
    if {*label_columns} <= {*names}:
        return label_columns
    synonyms = [name for name in names if name.casefold() in LABELS] if label_columns in ([LABEL], ["labels"]) else []
    if len(synonyms) > 1:
        remedy = override("task.label", synonyms[0]) + ", or another column"
        raise UserError("task.label", LABEL, f"could be {' or '.join(synonyms)}", remedy)
    return synonyms or None


def infer_label(label_columns: list[str], names: Sequence[str]) -> list[str]:
    """Return the label columns as ``find_label`` does.

    Raises:
        UserError: a column does not exist, or several columns could be the label.
    """
    if (columns := find_label(label_columns, names)) is None:
        missing = next(name for name in label_columns if name not in names)
        problem = f"no such column: the data have {listed_names(names)}"
        raise UserError("task.label", missing, problem, override("task.label", "<column of the labels>"))
    return columns


def text_candidates(types: Mapping[str, str], excluded: Iterable[str]) -> list[str]:
    """Return the columns that may be texts: those of text that are not identifiers, or else one named like a text."""
    names = [name for name in types if name not in {*excluded} and not is_key(name)]
    texts = [name for name in names if types[name] == TEXT]
    return texts or [name for name in names if types[name] == DIGITS and name.casefold() in _TEXTS]


def is_key(name: str) -> bool:
    """Return whether a column is named like an identifier of its row."""
    return name.casefold() in KEYS or _KEY.fullmatch(name) is not None


def has_label_word(name: str) -> bool:
    """Return whether a column is named like a form of the label."""
    return not LABEL_WORDS.isdisjoint(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).casefold()))


def as_pair(names: Sequence[str]) -> list[str] | None:
    """Return two names in the order of a known pair; None if they are no pair."""
    for first, second in (names, names[::-1]) if len(names) == 2 else ():
        is_numbered = len(first) > 1 and first[:-1] == second[:-1] and first[-1] + second[-1] in ("12", "ab", "AB")
        if is_numbered or second.casefold() in PAIRS.get(first.casefold(), ()):
            return [first, second]
    return None


def infer_texts(
    candidates: Sequence[str], keys: Sequence[str], columns: Mapping[str, list[Any]], labels: Sequence[str]
) -> list[str]:
    """Return the columns of texts among the candidates: the only one, or a known pair.

    A candidate that is named like a form of the label and gives it away, such as ``label_text``, is no text.

    Args:
        keys: other columns of text, which are named like identifiers.
        columns: values of the candidates.
        labels: label of each row.
    Raises:
        UserError: more than one choice is possible; all are named.
    """
    leaks = {name: how for name in candidates if (how := leak([*map(str, columns[name])], [*labels]))}
    texts = [name for name in candidates if name not in leaks or not has_label_word(name)]
    pair = as_pair(texts)
    if pair is not None and len([name for name in pair if name in leaks]) != 1:
        return pair
    if len(texts) == 1 and not (texts[0] in leaks and keys):
        return texts
    options = [*(texts or candidates), *(keys if len(texts) == 1 else [])]
    problem = f"could be {' or '.join(filter(None, [listed_names(options[:-1]), options[-1]]))}"
    if revealing := [name for name in options if name in leaks]:
        problem += f"; {revealing[0]} gives the label away: {leaks[revealing[0]]}"
    elif len(options) == 2:
        problem += ", or both: they are not named as a pair, such as sentence1 and sentence2"
    plain = [name for name in options if name not in leaks] or options
    pairs = [override("task.columns", pair) for pair in filter(None, map(as_pair, combinations(plain, 2)))]
    remedy = reduce(lambda text, pair: text + " or " + pair, pairs or [override("task.columns", plain[:1])])
    if not pairs and len(options) > 1:
        remedy += ", or two of them: " + override("task.columns", options[:2])
    raise UserError("task.columns", None, problem, remedy)


# --- What gives labels away


def leak(values: list[str], labels: list[str]) -> str | None:
    """Return how the values of a column give the labels away; None if they do not.

    Args:
        labels: label of each row.
    """
    if len(values) < MIN_ROWS:
        return None
    count, predicted, constant = predictability(values, labels)
    if predicted == 1 and constant < 1 and 2 * count <= len(values):
        return f"its {count:,} different texts have one label each"
    if FEW_VALUES * count <= len(values) and predicted - constant > PREDICTED * (1 - constant):
        return f"its {count:,} different texts predict {percent(predicted)} of the labels"
    for place, position in (("first", 0), ("last", -1)):
        words = [(text.split() or [""])[position] for text in values]
        count, predicted, constant = predictability(words, labels)
        if FEW_VALUES * count <= len(words) and predicted - constant > WORD_PREDICTED * (1 - constant):
            return f"the {place} word predicts {percent(predicted)} of the labels"
    return None


def predictability(values: Iterable[Any], labels: Iterable[Any]) -> tuple[int, float, float]:
    """Return how well the most frequent label of each value predicts the label.

    Returns:
        Number of different values, share of rows whose label is predicted, and share without knowing the value.
    """
    by_value: dict[Any, Counter[Any]] = defaultdict(Counter)
    total = Counter[Any]()
    for value, label in zip(values, labels, strict=True):
        by_value[value][label] += 1
        total[label] += 1
    count, predicted = total.total(), sum([max(counts.values()) for counts in by_value.values()])
    return len(by_value), predicted / count, max(total.values()) / count


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.{0 if share > 0.1 else 1}f} %"
