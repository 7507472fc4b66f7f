"""Scores of another model in columns of the data, as outputs of a task's head, and how good they are.

The columns hold probabilities, raw outputs, or hard answers such as those of a language model. Rows without a score are
left out of the examples and of the outputs alike. Where a validation split has gold labels and the columns, the scores
are measured before any training. ``task`` is a ``TextTask``, which is built on this module.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.common.errors import UserError, format_typed, override, quantity, short_list
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.metrics import compute_metrics
from distill_runner.datasets.readers.content import SplitTable, read_table
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.models.config import normalized_label
from distill_runner.tasks.columns import by_label, is_blank, numbers, printed_value
from distill_runner.tasks.decoding import MIN_PROBABILITY, OneClass, fitted_temperature

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet

TRANSFER = "transfer"
"""Name of the split that stands for a transfer set."""
_FENCE = re.compile(r"^.*?```(?:\w*\s)?(.*?)(?:```((?!```).)*)?$", re.DOTALL)
"""An answer of a language model with one fence, whose content is the answer."""
NOT_RAW = "takes numbers before the softmax, but these are probabilities: from 0 to 1, or with sums of 100"


@dataclass(frozen=True)
class Scores:
    """Scores of N rows as outputs of a task's head.

    Attributes:
        outputs: (N, C), float32; rows without a score hold NaN.
        is_used: (N,), whether a row is used: it has a score, which ``keep`` keeps.
        remarks: what was taken for what, normalized or left out.
    """

    outputs: np.ndarray
    is_used: np.ndarray
    remarks: list[str]


def training_scores(task: Any, transfer: "TransferSet | None") -> Scores:
    """Return the scores of the training split, or else of a transfer set.

    Raises:
        UserError: the columns do not exist, or do not hold scores.
    """
    table = score_table(task, task.train) if transfer is None else transfer_table(task, transfer)
    scores = read_scores(task, table, task.train if transfer is None else TRANSFER)
    used = scores.outputs[scores.is_used]
    are_shares = used.min() >= 0 and (used.max() <= 1 or np.allclose(used.sum(axis=1), 100, rtol=0.02))
    if task.logits and task.decoding.has_probabilities and not task.calibrate and are_shares:
        remedy = "If they are probabilities: " + override("task.probabilities", task.logits, "task.logits", None)
        raise UserError("task.logits", format_typed(task.logits), NOT_RAW, remedy)
    return scores


def score_table(task: Any, split: str) -> SplitTable:
    """Return the table of a split with its columns of scores.

    Raises:
        UserError: it lacks one of them.
    """
    return read_table(task, split, dict.fromkeys(task.prediction_columns, task.prediction_key))


def transfer_table(task: Any, transfer: "TransferSet") -> SplitTable:
    """Return the texts of a transfer set, or images, in columns of other names, and its columns of scores."""
    names = task.prediction_columns
    columns = transfer.inputs(dict.fromkeys(names, task.prediction_key))
    texts = [f"{TRANSFER} {number}" for number in range(len(columns) - len(names))]  # scores may be named 0 and 1
    by_name = dict(zip([*texts, *names], columns, strict=True))
    return SplitTable(by_name, None, all(isinstance(value, str) for name in names for value in by_name[name]))


def text_names(task: Any, table: SplitTable) -> list[str]:
    """Return the columns of the texts in a table that ``transfer_table`` returned."""
    return [name for name in table.columns if name not in task.prediction_columns]


def read_scores(task: Any, table: SplitTable, split: str) -> Scores:
    """Return the scores in a table that has the columns of scores.

    Raises:
        UserError: no row has a score, or a value is none.
    """
    outputs, remarks = raw_outputs(task, table, split)
    if task.calibrate:
        outputs = outputs / task.temperature
        remarks.append(f"calibrated: divided by the temperature {task.temperature:.4g}")
    has_score = ~np.isnan(outputs).any(axis=1)
    if not has_score.any():
        problem = f"no row of split '{split}' has a score"
        raise UserError(task.prediction_key, format_typed(task.prediction_columns), problem)
    if missing := int((~has_score).sum()):
        what = "an answer" if task.answers else "a score"
        remarks.append(f"{missing:,} of {quantity(len(outputs), 'row', ',')} without {what} left out")
    is_used = has_score.copy()
    if task.drop_leaks and split in (task.train, TRANSFER):
        names, rows = task.columns if split == task.train else text_names(task, table), selected_rows(table, has_score)
        is_used[has_score] = ~task.leaks([[*map(str, rows.columns[name])] for name in names])
        remarks.append(f"{int((has_score & ~is_used).sum()):,} near copies of validation and test texts left out")
    if task.keep is not None and split in (task.train, TRANSFER):
        least = float(task.keep.partition(":")[2]) - 1e-9  # 0.9 comes back from its logits as 0.8999999999999999
        is_used[has_score] &= task.decoding.confidence(outputs[has_score]) >= least
        total, count = int(has_score.sum()), int(is_used.sum())
        favors = task.decoding.indicators(task.decoding.labels(outputs), len(task.head.names)) > 0
        of_names = zip(task.head.names, favors.T, strict=True)
        counts = [f"{name} {(is_used & own).sum():,} of {(has_score & own).sum():,}" for name, own in of_names]
        remarks.append(f"{task.keep} keeps {count:,} of {total:,} ({count / total:.1%}): {short_list(counts)}")
        if not count:
            raise UserError("task.keep", task.keep, f"leaves no row of split '{split}'", "Take a lower probability.")
    return Scores(outputs.astype(np.float32), is_used, remarks)


def raw_outputs(task: Any, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
    """Return the scores (N, C) before calibration, NaN in rows without a score, and remarks on them."""
    values, remarks = answer_shares(task, table, split) if task.answers else ordered_numbers(task, table, split)
    has_part = np.isnan(values).any(axis=1) & ~np.isnan(values).all(axis=1)
    if task.top_k and has_part.any():
        own, is_missing = values[has_part], np.isnan(values[has_part])
        sums = np.nansum(own, axis=1, keepdims=True)
        if task.top_k == "spread":
            values[has_part] = np.where(is_missing, np.maximum(1 - sums, 0) / is_missing.sum(1, keepdims=True), own)
        else:
            values[has_part] = np.nan_to_num(own) / np.clip(sums, MIN_PROBABILITY, 1)
        rest = "equal parts of the rest of 1" if task.top_k == "spread" else "nothing"
        remarks.append(f"{quantity(len(own), 'row', ',')} without some classes, which get {rest}")
    rows = np.flatnonzero(~np.isnan(values).any(axis=1))
    if task.decoding.has_probabilities and not task.logits:
        typed_values = values.copy()
        values[rows], is_valid, changes = task.decoding.logits(values[rows])
        remarks += changes
        if not is_valid.all():
            row = int(rows[np.flatnonzero(~is_valid)[0]])
            cells = [table.columns[name][row] for name in task.prediction_columns]
            problem = f"row {row} of split '{split}' has {', '.join(map(str, cells))}, which are no probabilities"
            remedy = "From 0 to 1, for classes with the sum 1. Percentages: divide them by 100. "
            is_part = typed_values.shape[1] > 1 and typed_values[row].min() >= 0 and typed_values[row].max() <= 1
            top = "If only the top classes are known, leave the cells of the others empty, and set task.top_k."
            remedy += top if is_part else "Raw outputs: task.logits."
            raise UserError(task.prediction_key, format_typed(task.prediction_columns), problem, remedy)
    return values, remarks


def ordered_numbers(task: Any, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
    """Return the numbers in columns of scores (N, C) in the order of the outputs, and what was taken for what.

    Raises:
        UserError: a cell is no finite number, there is another number of columns, or their names say another order.
    """
    columns, key, names = task.prediction_columns, task.prediction_key, task.head.names or ()
    cells = [by_label(printed_value(x) or x if isinstance(x, str) else x) for x in table.columns[columns[0]]]
    if len(columns) == 1 and any(isinstance(cell, list | Mapping) for cell in cells):
        return listed_numbers(task, cells, split)
    values = np.array([numbers(table.columns[name]) for name in columns]).T
    blank = np.array([[is_blank(cell) or cell == "nan" for cell in table.columns[name]] for name in columns]).T
    if len(places := np.argwhere(np.isnan(values) & ~blank)):
        row, column = places[0].tolist()
        problem = f"row {row} of split '{split}' has {table.columns[columns[column]][row]!r}, not a finite number"
        remedy = "Write 0.85 (no % and no comma; -30 for -inf), and leave the cells of rows without a score empty."
        raise UserError(key, format_typed(columns), problem, remedy)
    classes = [class_of_column(column, names) for column in columns]
    if len(columns) == 1 and len(names) == 2 and isinstance(task.decoding, OneClass):
        own = 1 if classes[0] is None else classes[0]
        pair = [values, values]
        pair[1 - own] = 1 - values if task.probabilities else 0 * values
        return np.concatenate(pair, axis=1), [f"{columns[0]} is that of {names[own]}"]
    if len(columns) != len(names):
        problem = f"names {quantity(len(columns), 'column')}, but the task has {len(names)} outputs"
        raise UserError(key, format_typed(columns), problem, f"In their order: {', '.join(names)}.")
    if len({*classes} - {None}) == len(classes) and classes != list(range(len(classes))):
        problem = f"are named in another order than the classes, {', '.join(names)}"
        order = [columns[classes.index(number)] for number in range(len(columns))]
        raise UserError(key, format_typed(columns), problem, override(key, order) + ", or rename the columns.")
    return values, []


def listed_numbers(task: Any, cells: Sequence[Any], split: str) -> tuple[np.ndarray, list[str]]:
    """Return the numbers (N, C) of a column with a list in the order of the outputs, or with an object, in each row.

    Raises:
        UserError: a list has another length, an object other keys than the classes, or a value is no finite number.
    """
    names = task.head.names or ()
    values = np.full((len(cells), task.head.num_labels), np.nan)
    for row, cell in enumerate(cells):
        if is_blank(cell):
            continue
        scores = cell if isinstance(cell, list) else []
        if isinstance(cell, Mapping):
            parts = {name: number for name, number in cell.items() if number is not None}
            by_name = {normalized_label(str(name)): number for name, number in parts.items()}
            scores = [by_name.get(normalized_label(name)) for name in names]
            scores = scores if len(scores) - scores.count(None) == len(by_name) == len(parts) else []
        own, is_missing = numbers(scores), [score is None and task.top_k is not None for score in scores]
        if len(scores) != len(values[row]) or (np.isnan(own) & ~np.array(is_missing)).any():
            problem = f"row {row} of split '{split}' has {str(cell)[:60]}, not a finite number for each output"
            remedy = f"A list in the order {short_list(names)}, or an object with these keys."
            if scores.count(None) and task.probabilities and isinstance(task.decoding, OneClass):
                remedy = "If it has the top classes only: " + override("task.top_k", "spread") + ", or drop."
            raise UserError(task.prediction_key, format_typed(task.prediction_columns), problem, remedy)
        values[row] = own
    return values, [f"in the order {short_list(names)}"] if names else []


def answer_shares(task: Any, table: SplitTable, split: str) -> tuple[np.ndarray, list[str]]:
    """Return the share (N, C) of each label among the answers of each row, or their mean for scores."""
    total = np.zeros((len(table.columns[task.prediction_columns[0]]), task.head.num_labels))
    counts, variants = np.zeros(len(total), dtype=np.int64), Counter[str]()
    for name in task.prediction_columns:
        own, own_table = task_of_answers(task, name, table)
        values = own.label_values(own_table)
        has_answer = np.array([not own.is_unlabeled(value) for value in values], dtype=bool)
        try:
            labels = own.encode([value for value, one in zip(values, has_answer, strict=True) if one], own_table, split)
        except UserError as error:
            names = {"", *(map(normalized_label, task.names) if task.has_classes else ())}
            others = [one for one in map(str, values) if one.isprintable() and normalized_label(one) not in names]
            remedy = f"The classes are {short_list(task.names)}. " if task.has_classes else ""
            no_answer = override("task.no_answer", [*(task.no_answer or ()), *(others[:1] or ["<text of one line>"])])
            remedy += f"What is no answer is listed, such as {no_answer}"
            if any(isinstance(printed_value(x) if isinstance(x, str) else x, list) for x in values):
                remedy = "Give each of several answers a column: " + override("task.answers", ["<one>", "<other>"])
            problem = error.problem.replace("has the label", "has the answer")
            raise UserError("task.answers", name, problem, remedy) from error
        total[has_answer] += task.decoding.indicators(labels, task.head.num_labels)
        counts += has_answer
        originals = [str(value) for value, one in zip(table.columns[name], has_answer, strict=True) if one]
        variants.update(text for text in originals if text not in task.names)
    shares = np.full(total.shape, np.nan)
    np.divide(total, counts[:, None], out=shares, where=counts[:, None] > 0)
    low, high = counts[counts > 0].min(initial=len(task.prediction_columns)), counts.max(initial=0)
    remarks = list[str]()
    if high > 1:
        remarks.append(f"shares of {low} to {high} answers" if low < high else f"shares of {high} answers")
    if task.has_classes:
        of_classes = zip(task.names, total.sum(axis=0).astype(int), strict=True)
        remarks.append(f"answers: {short_list([f'{name} {count:,}' for name, count in of_classes])}")
        spellings = [f"{text[:40]!r} {count:,}" for text, count in variants.most_common()]
        if spellings:
            remarks.append(f"{variants.total():,} in another spelling: {short_list(spellings)}")
    if missing := len(total) * len(task.prediction_columns) - int(counts.sum()):
        remarks.append(f"{missing:,} are empty or in task.no_answer")
    return shares, remarks


def task_of_answers(task: Any, column: str, table: SplitTable) -> tuple[Any, SplitTable]:
    """Return the task with a column of answers as its labels, and the table of that column without ``no_answer``."""
    skipped = {word.casefold() for word in task.no_answer or ()}
    values = table.columns[column]
    class_names = set(map(normalized_label, task.labels or ())) if task.has_classes else set[str]()
    class_names |= set(map(normalized_label, skipped)) if class_names else set()
    answers = [read_answer(value, class_names) for value in values]
    answers = ["" if isinstance(own, str) and own.strip().casefold() in skipped else own for own in answers]
    own = task.model_copy(update={"label": column, "gold": "all", "class_weights": None})
    return own, SplitTable({column: answers}, None, table.untyped)


def read_answer(value: Any, class_names: Collection[str]) -> Any:
    """Return an answer that names no class without quotes and stars around it and without a final stop.

    An object, such as ``{"label": "good", "reason": "..."}``, also as JSON in a fence, is read by its only field that
    names a class, and without names of classes by its only field. What cannot be read so stays as it is.

    Args:
        class_names: names of the classes and of no answer, as ``normalized_label`` returns them. An answer that is one
            of them is kept.
    """
    content = printed_value(_FENCE.sub(r"\1", value)) if isinstance(value, str) else value
    if isinstance(content, Mapping):
        answers = [read_answer(field, class_names) for field in content.values()]
        answers = [own for own in answers if not class_names or _names_classes(own, class_names)]
        return answers[0] if len(answers) == 1 else value
    if not isinstance(value, str) or _names_classes(value, class_names):
        return value
    trimmed = re.sub(r"""^[\s"'`*“”‘’«»]+|[\s"'`*“”‘’«».。!]+$""", "", value)
    return trimmed if _names_classes(trimmed, class_names) else value


def _names_classes(answer: Any, class_names: Collection[str]) -> bool:
    """Return whether an answer is the name of a class, or a list of such names."""
    names = answer if isinstance(answer, list) else [answer]
    return all(normalized_label(str(name)) in class_names for name in names)


def class_of_column(column: str, names: Sequence[str]) -> int | None:
    """Return the number of the class that a column's name ends with, as in ``p_<class>``, or else holds as a part.

    Marks do not count: ``p_House-hold`` and ``householdScore`` name the class ``household``. None of two equally long.
    """
    own = normalized_label(column)
    ends = [
        number for number, name in enumerate(names) if re.search(rf"(^|[\W_]){re.escape(normalized_label(name))}$", own)
    ]
    words = re.split(r"[\W_]+", normalized_label(re.sub(r"(?<=[^\W_A-Z])(?=[A-Z])", "_", column)))
    plain_names = [re.sub(r"[\W_]+", "", normalized_label(name)) for name in names]
    for lasts in ([len(words)], range(len(words))):  # runs of words up to the end, then the others
        runs = {"".join(words[first:last]) for last in lasts for first in range(last)} - {""}
        ends = ends or [number for number, name in enumerate(plain_names) if name in runs]
    sizes = [len(names[number]) for number in ends]
    return max(ends, key=lambda number: len(names[number])) if sizes.count(max(sizes, default=0)) == 1 else None


def fit_temperature(task: Any) -> float:
    """Return the temperature that calibrates the scores, fitted on the first validation split.

    Raises:
        UserError: it lacks the columns, scores or gold labels.
    """
    name, split = next(iter(task.validation.items()))
    with recorded_tables():  # not among what is read of the split whose scores are scaled
        table = score_table(task, split)
    if (labeled := labeled_scores(task, table, split)) is None or not task.decoding.has_probabilities:
        problem = f"task.validation.{name} has no classes with scores to fit a temperature on"
        raise UserError("task.calibrate", True, problem, "Leave it out.")
    return fitted_temperature(*labeled)


def labeled_scores(task: Any, table: SplitTable, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scores before calibration (n, C) and the gold labels of the rows with a score; None without any."""
    outputs, _ = raw_outputs(task, table, split)
    has_score = ~np.isnan(outputs).any(axis=1)
    labels = task.gold_labels(selected_rows(table, has_score), None, split) if has_score.any() else None
    return None if labels is None else (outputs[has_score], labels)


def selected_rows(table: SplitTable, rows: np.ndarray) -> SplitTable:
    """Return the table with the rows where ``rows`` (N,) is true."""
    numbers = np.flatnonzero(rows).tolist()
    columns = {name: [values[row] for row in numbers] for name, values in table.columns.items()}
    return replace(table, columns=columns)


# --- Their account


def scores_line(task: Any, transfer: "TransferSet | None") -> AccountLine:
    """Return the line on the scores that a student learns from.

    Args:
        transfer: transfer set whose scores the student learns from; None for those of the training split.
    Raises:
        UserError: the columns do not exist, or do not hold scores.
    """
    scores = training_scores(task, transfer)
    columns, names, count = task.prediction_columns, task.head.names or (), int(scores.is_used.sum())
    of_outputs = f" = {short_list(names)}" if not task.answers and len(columns) == len(names) else ""
    parts = [f"{short_list(columns)}{of_outputs}: {quantity(count, 'row', ',')}", *scores.remarks]
    warnings = ["no gold labels: all metrics are the agreement with these scores"] if task.gold == "none" else []
    favored = np.unique(scores.outputs[scores.is_used].argmax(axis=1))
    if isinstance(task.decoding, OneClass) and len(favored) == 1 < count:
        warnings.append(f"the scores favor {names[favored[0]]} in all rows: are they those of the predicted class?")
    quality: dict[str, Any] = {}
    for name, validation in task.validation.items() if task.gold != "none" else ():
        measured = quality_of(task, validation)
        if measured is None:
            parts.append(f"{name} has none, so that their quality is unknown")
            continue
        quality[name] = measured
        values = [f"{key} {100 * value:.1f}" for key, value in measured.items() if key in task.metric_names]
        parts.append(f"{name}: {', '.join(values)}")
        if measured.get("accuracy", 1.0) < measured.get("chance", 0.0):
            warnings.append(f"on {name} the scores are right less often than one constant class: are columns swapped?")
    details = {"rows": count, "columns": columns, "quality": quality}
    return AccountLine("scores", "; ".join(parts), tuple(warnings), details)


def quality_of(task: Any, split: str) -> dict[str, Any] | None:
    """Return the metrics of the scores of a split against its gold labels; None if it lacks one of the two."""
    table = read_table(task, split)
    has_columns = set(task.prediction_columns) <= table.columns.keys()
    if not has_columns or (labeled := labeled_scores(task, table, split)) is None:
        return None
    outputs = (labeled[0] / (task.temperature if task.calibrate else 1)).astype(np.float32)
    metrics = [name for name in dict.fromkeys([*task.metrics, "accuracy", "ece"]) if name in task.metric_names]
    measured: dict[str, Any] = {"examples": len(outputs), **compute_metrics(metrics, outputs, labeled[1])}
    if np.issubdtype(labeled[1].dtype, np.integer):
        measured["chance"] = float(np.bincount(labeled[1]).max() / len(outputs))
    return measured
