"""Compare the predictions of any programs in files, by the tests that compare runs.

Several files of one method are its seeds, paired by their order. Where a method has one file, the conclusion is on
these models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, quantity, require_choice
from distill_runner.common.terminal import markdown_table
from distill_runner.report.compare import Comparison, compare_cells, correct
from distill_runner.report.file_scores import TYPES, Scored, type_of
from distill_runner.report.formats import as_mapping, escaped
from distill_runner.report.frame import Cell, Point
from distill_runner.report.prediction_files import RENAME, is_scores, label_text, read_values
from distill_runner.report.resampling import SummedScores, f1_by_class

LABEL_DRAWS = 2_000

Row = dict[str, Any]


@dataclass(frozen=True)
class FileComparison:
    """Scores of methods, the tests of the first against each other one, and what they agree on.

    Attributes:
        account: what was taken from each file, a line each.
        methods: method, files, score with its interval over examples in points, and deviation over seeds.
        comparisons: the tests.
        labels: label, number of gold ones, F1 of both in points, their difference and its 95% interval over examples.
        agreement: pair, or one method twice, and the share, or the correlation, of equal predictions of their files.
    """

    account: list[str]
    methods: list[Row]
    comparisons: list[Comparison]
    labels: list[Row]
    agreement: list[Row]

    def as_json(self) -> Row:
        return {**vars(self), "comparisons": [*map(as_mapping, self.comparisons)]}

    def as_text(self, sentences: str) -> str:
        """Return the comparison in Markdown; ``sentences`` are its tests in words."""
        tables = [_table(self.methods), sentences.strip(), _table(self.labels), _table(self.agreement)]
        return "\n\n".join(filter(None, ["\n".join(f"- {escaped(line)}" for line in self.account), *tables])) + "\n"


def _table(rows: Sequence[Row]) -> str:
    def cell(name: str, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(cell(name, one) for one in value)}]"
        digits = 4 if name in ("share", "correlation") else 2
        return f"{value:.{digits}f}" if isinstance(value, float) else "" if value is None else escaped(str(value))

    table = [[cell(name, value) for name, value in row.items()] for row in rows]
    return markdown_table([*rows[0]], table, text_columns=2) if rows else ""


def methods_of(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of each method, of arguments such as ``a.csv`` or ``rkd=a1.csv,a2.csv``."""
    methods: dict[str, list[Path]] = {}
    for argument in arguments:
        name, mark, files = argument.partition("=")
        if Path(argument).is_file() or not mark:
            name, files = Path(argument).stem, argument
            name = argument if name in methods else name  # b/predictions.csv beside a/predictions.csv
        methods.setdefault(name, []).extend(Path(file) for file in ([files] if files == argument else files.split(",")))
    return methods


def compare_files(
    predictions: Mapping[str, Sequence[Path]],
    gold_file: Path,
    margin: float | None = None,
    looks: int = 1,
    metric: str | None = None,
    task_type: str | None = None,
    labels: Sequence[str] = (),
) -> FileComparison:
    """Compare the first method with each other one; a single method is only scored.

    Args:
        predictions: method -> its files, one a seed.
        gold_file: labels of the same examples, or qrels.
        margin, looks: as for ``compare``.
        metric: one of the task type's metrics; None is the first.
        task_type: a key of ``TYPES``; None is what the gold labels look like.
        labels: classes in the order of their numbers; the second is the positive one.
    Raises:
        UserError: a file cannot be read, its ids are not those of the gold file, or can be taken in two ways.
    """
    sizes = {len(own) for own in predictions.values()}
    if not sizes or 0 in sizes or len(sizes - {1}) > 1:
        raise UserError("--predictions", None, "needs as many files of each method, or one", "Files are paired.")
    gold = read_values(gold_file, "--gold")
    if not gold.values:
        raise UserError("--gold", gold_file, "has no labels", "It needs a column of them.")
    order = [*(labels or gold.names)]
    texts = (one for value in gold.values for one in (value if isinstance(value, list | tuple) else [value]))
    classes = order or [*dict.fromkeys(map(label_text, texts))]
    files = [read_values(file, "--predictions", classes, gold.columns) for own in predictions.values() for file in own]
    kind = task_type or type_of(gold, files[0])
    require_choice("--type", kind, TYPES, "there is no such task type")
    if are_classes := kind in ("classification", "multilabel"):
        files = [file.with_classes(classes) for file in files]
    for file in (gold, *files):
        is_ranking = bool(file.values) and all(map(is_scores, file.values))
        if not (is_ranking if kind == "retrieval" else file.values or (are_classes and file.scores is not None)):
            raise UserError("--predictions", file.file, f"has no predictions of {kind}: {file.text}", RENAME)
    names, read = TYPES[kind]
    metric = metric or names[0]
    require_choice("--metric", metric, names, f"is no metric of {kind}")
    files = files if kind == "retrieval" else [file.in_order_of(gold) for file in files]
    parts = read(metric, gold, files, order)
    account = [f"{gold_file}: {kind}, {quantity(len(gold.values), 'example', ',')}, {metric}; {gold.text}"]
    for file, part in zip(files, parts, strict=True):
        reason = getattr(part.predictions.score(metric), "reason", "")
        undefined = f"; no score: {reason}" if reason else ""
        is_gold = file.values == gold.values
        doubt = "; it has the gold labels themselves: is another column the prediction?" if is_gold else ""
        account.append(f"{file.file}: {file.text}{part.remark}{undefined}{doubt}")
    scored = {method: [parts.pop(0) for _ in own] for method, own in predictions.items()}
    cells = {method: _cell(metric, gold_file.stem, own) for method, own in scored.items()}
    first, *others = cells
    pairs = [{first: cells[first], other: cells[other]} for other in others]
    comparisons = correct([compare_cells(pair, gold_file.stem, margin, looks) for pair in pairs])
    tests = comparisons or [compare_cells({first: cells[first], "": cells[first]}, gold_file.stem)]
    rows = []
    for number, (method, cell) in enumerate(cells.items()):
        # A test has the intervals of both its methods, the first of which is the first of all.
        intervals, spread = tests[max(number - 1, 0)].score_intervals, cell.points[0].spread
        # Resampling raises an ECE, so that percentiles of it are no interval.
        bounds = None if intervals is None or metric == "ece" else [100 * bound for bound in intervals[min(number, 1)]]
        rows.append({"method": method, "files": ", ".join(map(str, predictions[method])), "score": spread.mean})
        rows[-1] |= {"interval": bounds, "sd": spread.sd}
    of_labels = [row for other in others for row in _label_rows(first, other, scored)]
    return FileComparison(account, rows, comparisons, of_labels, _agreement(scored, kind == "regression"))


def _cell(metric: str, task: str, files: Sequence[Scored]) -> Cell:
    """Return the files of a method as runs, whose seeds are the places of the files."""
    read = [file.predictions for file in files]
    runs = [{"seed": seed, "metric": metric, "score": one.score(metric), "read": one} for seed, one in enumerate(read)]
    return Cell((Point(tuple({**run, "split": task} for run in runs)),))


def _label_rows(first: str, second: str, scored: Mapping[str, Sequence[Scored]]) -> list[Row]:
    """Return F1 of both methods on each label, with a bootstrap interval of the difference over the examples."""
    names = [*scored[first][0].counts]
    if not names:
        return []
    files = [scored[method] for method in (first, second)]
    one, other = ([np.concatenate([part.counts[name] for name in names], axis=1) for part in own] for own in files)
    scores = SummedScores(one, other, lambda sums: np.swapaxes(f1_by_class(sums), -1, -2))  # (..., labels, runs)
    scores.draws = LABEL_DRAWS
    bounds = 100 * np.quantile(scores.difference(scores.resampled), [0.025, 0.975], axis=0).T
    f1, other_f1 = (100 * part.mean(axis=-1) for part in np.split(scores.observed, [len(one)], axis=-1))
    return [
        {
            "label": name,
            "against": second,
            "gold": int(scored[first][0].counts[name][:, 2].sum()),
            "f1": float(f1[place]),
            "other_f1": float(other_f1[place]),
            "difference": float(f1[place] - other_f1[place]),
            "interval": bounds[place].tolist(),
        }
        for place, name in enumerate(names)
    ]


def _agreement(scored: Mapping[str, Sequence[Scored]], are_numbers: bool) -> list[Row]:
    """Return how far the files of the first method and of each other one agree, and those of one method."""

    def share(one: Scored, other: Scored) -> float:
        if are_numbers:
            return float(np.corrcoef(one.keys, other.keys)[0, 1])
        return fmean(key == other_key for key, other_key in zip(one.keys, other.keys, strict=True))

    first, *others = scored
    pairs = [(first, other, [*product(scored[first], scored[other])]) for other in others]
    pairs += [(method, method, [*combinations(own, 2)]) for method, own in scored.items() if len(own) > 1]
    what = "correlation" if are_numbers else "share"
    return [{"agree": a, "with": b, what: fmean(share(*pair) for pair in files)} for a, b, files in pairs]
