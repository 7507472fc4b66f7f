"""Compare the predictions of any programs in files, by the tests that compare runs.

Read are the forms of docs/compare.md: tables with named columns (pandas, scikit-learn, ``distill-run predict``, a
language model), run_glue's and run_ner's ``.txt``, run_qa's answers by id, TREC runs and qrels, and
sentence-transformers' rankings. What was taken is a sentence of the file; what can be taken in two ways is refused.

A file becomes the predictions of a run: outputs with gold labels, counts of sets, or scores of examples. Several files
of one method are its seeds, paired by their order. Where a method has one file, the conclusion is on these models.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any
from unicodedata import normalize

import numpy as np

from distill_runner.common.errors import UserError, quantity, require_file, suggestion
from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.metrics import (
    CLASSIFICATION_METRICS,
    OF_PROBABILITIES,
    OF_SECOND_CLASS,
    REGRESSION_METRICS,
    SUMMED,
)
from distill_runner.datasets.readers.content import listed_names, open_split
from distill_runner.report.compare import Comparison, Predictions, compare_cells, correct
from distill_runner.report.formats import as_mapping, escaped
from distill_runner.report.frame import Cell, Point
from distill_runner.report.resampling import SummedScores, f1_by_class
from distill_runner.tasks.columns import as_lists, printed_value
from distill_runner.tasks.decoding import OneClass
from distill_runner.tasks.questions.answers import normalize_answer, question_scores
from distill_runner.tasks.split_account import short_list
from distill_runner.tasks.tokens.tags import TagSet, complete_names, spelled_parts
from distill_runner.tasks.vectors.retrieval import ranking_scores

# --- Values in files


IDS = ("id", "index", "idx", "guid", "", "Unnamed: 0")
"""Names of columns of ids, the first of which is taken; pandas writes its index without a name."""
ROW_NUMBERS = ("index", "", "Unnamed: 0")
"""Those that programs fill with the numbers of the rows."""
PREDICTED = ("prediction", "predictions", "predicted", "predicted_label", "pred", "y_pred", "prediction_text")
LABELS = ("label", "labels", "gold", "target", "y_true", "answers", "answer", "ner_tags", "tags", "spans")
PREFIX = "p_"
"""Of columns of the probability of a class, as ``distill-run predict`` writes them."""
RENAME = "Name one column prediction in files of predictions, and label in the gold file."
SAME_EXAMPLES = "Compare predictions of the same examples; those of files without ids have the order of the gold file."
_RUN, _QRELS = re.compile(r"\S+\s+Q0(\s+\S+){4}"), re.compile(r"\S+\s+\S+\s+\S+\s+-?\d+")


@dataclass(frozen=True)
class Values:
    """What a file says of N examples.

    Attributes:
        ids: of the examples; None if the file has none, so that its order counts.
        values: a label, number, answer or list for each; scores of documents by their ids for rankings; empty if there
            are only ``scores``.
        scores: (N, C), probabilities or logits; None without.
        names: classes of the columns of scores, or those that numbers stand for; empty if the file does not name them.
        contexts: the text that each example is about, if several examples may be about one.
        may_be_rows: whether the ids may be the numbers of the rows.
        text: what was taken.
    """

    file: Path
    ids: list[str] | None
    values: list[Any]
    scores: np.ndarray | None = None
    names: Sequence[str] = ()
    contexts: Sequence[str] | None = None
    may_be_rows: bool = False
    text: str = ""

    def in_order_of(self, gold: "Values") -> "Values":
        """Return the examples in the order of ``gold``, whose ids are the numbers of its rows if it has none.

        Raises:
            UserError: the ids are not those of ``gold``, one occurs twice, or they may be the numbers of the rows.
        """
        rows = [*map(str, range(len(gold.values)))]
        expected = rows if gold.ids is None else gold.ids
        if self.ids is None or (self.ids == rows and {*expected} != {*rows}):
            if (size := len(self.values if self.scores is None else self.scores)) != len(rows):
                problem = f"has {size:,} rows, and {gold.file} has {len(rows):,}"
                raise UserError("--predictions", self.file, problem, SAME_EXAMPLES)
            return replace(self, text=f"{self.text}, in the order of the rows")
        if self.may_be_rows and self.ids == rows != expected:
            problem = f"numbers its rows, which may be their order, or ids that {gold.file} has in another order"
            raise UserError("--predictions", self.file, problem, "Name the column id, or remove it for the order.")
        sides = (self.file, self.ids, gold.file, {*expected}), (gold.file, expected, self.file, {*self.ids})
        for key, (file, ids, other, others) in zip(("--predictions", "--gold"), sides, strict=True):
            if len({*ids}) < len(ids):
                twice = Counter(ids).most_common(1)[0][0]
                raise UserError(key, file, f"has the id '{twice}' twice", "Give each example its own.")
            if lacking := [one for one in ids if one not in others]:
                problem = f"has the id '{lacking[0]}', which {other} lacks, as {len(lacking):,} of {len(ids):,} ids"
                raise UserError(key, file, problem, SAME_EXAMPLES)
        place = {one: row for row, one in enumerate(self.ids)}
        order = [place[one] for one in expected]
        values = [self.values[row] for row in order] if self.values else []
        return replace(self, ids=expected, values=values, scores=None if self.scores is None else self.scores[order])


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


def label_text(value: Any) -> str:
    """Return a label as text: a whole number without decimals, as CSV and JSON may write it in two ways."""
    text = normalize("NFC", str(int(value) if isinstance(value, bool) else "" if value is None else value).strip())
    return text[:-2] if text.endswith(".0") and re.fullmatch(r"-?\d+\.0", text) else text


def read_values(file: Path, key: str, classes: Sequence[str] = ()) -> Values:
    """Read a file of predictions, or of gold labels.

    Args:
        key: ``--predictions`` or ``--gold``.
        classes: labels of the gold file, which name columns of scores.
    Raises:
        UserError: the file cannot be read, or could be read in several ways.
    """
    require_file(key, file)
    try:
        return _parse(file, key, classes)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(key, file, f"cannot be read: {error}") from error


def _parse(file: Path, key: str, classes: Sequence[str]) -> Values:
    is_text = file.suffix not in (".parquet", ".arrow", ".gz", ".zip")
    content = file.read_text(encoding="utf-8-sig", errors="replace") if is_text else ""
    first, lines = content.lstrip().partition("\n")[0].strip(), content.removesuffix("\n").split("\n")
    if _RUN.fullmatch(first) or (key == "--gold" and _QRELS.fullmatch(first)):
        rows = [line.split() for line in lines if line.strip()]
        return _rankings(file, ((row[0], row[2], row[-2] if len(row) > 4 else row[-1]) for row in rows))
    if file.suffix == ".txt" and "\t" not in first:
        return Values(file, None, lines, text="a line for each example")
    if first.startswith("{") and file.suffix == ".json" and (answers := _answers(content)) is not None:
        return Values(file, [*answers], [*answers.values()], text="answers by id")
    class_names: Mapping[str, list[str]] = {}
    if file.suffix == ".txt":  # as run_glue writes
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        records, names = [*table], list(table.fieldnames or ())
        if any(None in record.values() for record in records):
            raise UserError(key, file, "has a line with too few columns", "Write the file again.")
    else:
        try:
            with open_split(CorpusPart(dataset=str(file), columns=["text"]), "train") as split:
                records, names, class_names = [*split.rows()], split.column_names, split.class_names
        except UserError as error:
            remedy = "Save it as UTF-8." if ".encoding=" in error.remedy else error.remedy
            raise UserError(key, file, error.problem, remedy) from error
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in records] for name in names}
    if {"query-id", "corpus-id", "score"} <= columns.keys():  # qrels of the hub
        return _rankings(file, ((row["query-id"], row["corpus-id"], row["score"]) for row in records))
    if {"query_id", "results"} <= columns.keys():  # sentence-transformers' rankings
        pairs = zip(columns["query_id"], columns["results"], strict=True)
        return _rankings(file, ((query, one["corpus_id"], one["score"]) for query, own in pairs for one in own))
    return _of_columns(file, key, columns, class_names, classes)


def _answers(content: str) -> dict[str, str] | None:
    """Return the answers in an object of answers, or of the n best ones, by id, as run_qa writes; else None."""
    try:
        values = json.loads(content)
        best = {key: value if isinstance(value, str) else value[0]["text"] for key, value in values.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return best if all(isinstance(answer, str) for answer in best.values()) else None


def _of_columns(
    file: Path, key: str, columns: Mapping[str, list[Any]], class_names: Mapping[str, list[str]], classes: Sequence[str]
) -> Values:
    id_name = next((name for name in IDS if name in columns), None)
    ids = None if id_name is None else [*map(label_text, columns[id_name])]
    others = [name for name in columns if name != id_name]
    prefixed = [name for name in others if name.startswith(PREFIX)]
    sets = prefixed, [name for name in others if classes and name.isdigit()], [*classes]
    scored = next((own for own in sets if len(own) > 1 and {*own} <= {*others}), [])
    scores = np.column_stack([columns[name] for name in scored]).astype(np.float64) if scored else None
    if scores is not None and not np.isfinite(scores).all():
        raise ValueError(f"a score in the columns {listed_names(scored)} is missing or not finite")
    rest = [name for name in others if scored is sets[-1] and name not in (*scored, *PREDICTED, *LABELS)]
    rest = [name for name in rest if all(_NUMBER.fullmatch(label_text(value)) for value in columns[name])]
    # A class that no example has, or a number of another kind.
    if rest and scores is not None and not OneClass().logits(scores)[1].all():
        problem = f"has scores of {listed_names(scored)}, and maybe of {listed_names(rest)}, which no gold label is"
        raise UserError(key, file, problem, f"Name all columns of scores {PREFIX}<class>.")
    groups = (() if key == "--gold" else PREDICTED, LABELS, ("score",), () if scored else others)
    candidates = next(filter(None, ([name for name in group if name in others] for group in groups)), [])
    if len(candidates) > 1 or not (candidates or scored):
        problem = f"has the columns {listed_names(candidates or [*columns])}: which one is meant?"
        raise UserError(key, file, problem, RENAME)
    values = as_lists(columns[candidates[0]], list | dict) if candidates else []
    if labels := class_names.get(candidates[0], []) if candidates else []:
        name_of = dict(enumerate(labels)).get  # None for -1, which is "no label" on the hub
        values = [[*map(name_of, value)] if isinstance(value, list) else name_of(value) for value in values]
    taken = (("ids", id_name), ("column", *candidates[:1]), ("scores from", *scored[:1]))
    text = ", ".join(f"{what} '{name[0]}'" for what, *name in taken if name and name[0] is not None)
    names = [name.removeprefix(PREFIX) for name in scored] if scored is prefixed else scored
    return Values(file, ids, values, scores, names or labels, columns.get("context"), id_name in ROW_NUMBERS, text)


def _rankings(file: Path, rows: Iterable[tuple[Any, Any, Any]]) -> Values:
    """Return the documents of each query with their scores, of rows of query, document and score."""
    by_query: dict[str, dict[str, float]] = {}
    for query, document, score in rows:
        documents = by_query.setdefault(str(query), {})
        if str(document) in documents or np.isnan(number := float(score)):
            raise ValueError(f"query '{query}' has the document '{document}' twice, or without a score")
        documents[str(document)] = number
    return Values(file, [*by_query], [*by_query.values()], text=f"documents of {len(by_query):,} queries")


# --- From values to a comparison

LABEL_DRAWS = 2_000
SEPARATORS = (";", "|", ",")
"""Marks between the labels of a text, the first of which is taken where gold labels have several."""
IN_ORDER = "Name the classes in the order of their numbers: --labels no,yes"
_TAGS = re.compile(r"((^| +)(O|[BIMELSU]-\S+))+")
_INTEGER, _NUMBER = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Scored:
    """What one file predicted.

    Attributes:
        predictions: as those of a run.
        keys: of each example: equal keys are equal predictions.
        counts: (N, 3) by label: true positives, predicted and actual positives.
        remark: what a reader has to know of it.
    """

    predictions: Predictions
    keys: Sequence[Any] | np.ndarray
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    remark: str = ""


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
        account = "\n".join(f"- {escaped(line)}" for line in self.account)
        tables = [_table(self.methods), sentences.strip(), _table(self.labels), _table(self.agreement)]
        return "\n\n".join(filter(None, [account, *tables])) + "\n"


def _table(rows: Sequence[Row]) -> str:
    def cell(name: str, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(cell(name, one) for one in value)}]"
        digits = 4 if name in ("share", "correlation") else 2
        return f"{value:.{digits}f}" if isinstance(value, float) else "" if value is None else escaped(str(value))

    table = [[cell(name, value) for name, value in row.items()] for row in rows]
    return markdown_table([*rows[0]], table, text_columns=2) if rows else ""


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
    gold = read_values(gold_file, "--gold")
    if not gold.values:
        raise UserError("--gold", gold_file, "has no labels", "It needs a column of them.")
    order = [*(labels or gold.names)]
    classes = order or [*dict.fromkeys(map(str, map(label_text, gold.values)))]
    files = [read_values(file, "--predictions", classes) for own in predictions.values() for file in own]
    kind = task_type or _type(gold, files[0])
    if kind not in TYPES:
        raise UserError("--type", kind, "there is no such task type", suggestion(kind, TYPES))
    names, read = TYPES[kind]
    if (metric := metric or names[0]) not in names:
        raise UserError("--metric", metric, f"is no metric of {kind}", suggestion(metric, names))
    files = files if kind == "retrieval" else [file.in_order_of(gold) for file in files]
    parts = read(metric, gold, files, order)
    account = [f"{gold_file}: {kind}, {quantity(len(gold.values), 'example', ',')}, {metric}; {gold.text}"]
    same = "; it has the gold labels themselves: is another column the prediction?"
    for file, part in zip(files, parts, strict=True):
        undefined = f"; no score: {reason}" if (reason := getattr(part.predictions.score(metric), "reason", "")) else ""
        account.append(f"{file.file}: {file.text}{part.remark}{undefined}{same if file.values == gold.values else ''}")
    scored = {method: [parts.pop(0) for _ in own] for method, own in predictions.items()}
    cells = {method: _cell(metric, gold_file.stem, own) for method, own in scored.items()}
    first, *others = cells
    pairs = [{first: cells[first], other: cells[other]} for other in others]
    comparisons = correct([compare_cells(pair, gold_file.stem, margin, looks) for pair in pairs])
    tests = comparisons or [compare_cells({first: cells[first], "": cells[first]}, gold_file.stem)]
    rows = []
    for number, (method, cell) in enumerate(cells.items()):
        intervals, spread = tests[max(number - 1, 0)].score_intervals, cell.points[0].spread
        bounds = None if intervals is None else [100 * bound for bound in intervals[min(number, 1)]]
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
    gold = [int(scored[first][0].counts[name][:, 2].sum()) for name in names]
    keys = ("label", "against", "gold", "f1", "other_f1", "difference", "interval")
    numbers = f1.tolist(), other_f1.tolist(), (f1 - other_f1).tolist(), bounds.tolist()
    return [dict(zip(keys, row, strict=True)) for row in zip(names, [second] * len(names), gold, *numbers, strict=True)]


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


# --- From values to predictions, by task type


def _type(gold: Values, sample: Values) -> str:
    """Return the task type that gold labels look like.

    Raises:
        UserError: they can be of two.
    """
    if isinstance(gold.values[0], dict):
        return "questions" if "text" in gold.values[0] else "retrieval"
    parts = [one for value in gold.values if isinstance(value, list) for one in value]
    if any(isinstance(one, dict) for one in parts):
        return "questions" if any("answer_start" in one for one in parts) else "tokens"
    if parts and not any(spelled_parts(str(one)) for one in parts):
        problem = "has lists, of tags of words or of labels of a text"
        raise UserError("--gold", gold.file, problem, "Say which: --type tokens, or --type multilabel.")
    texts, others = ([label_text(value) for value in file.values] for file in (gold, sample))
    if parts or not all(map(_NUMBER.fullmatch, texts)):
        are_tags = all(map(_TAGS.fullmatch, texts)) and any(" " in text for text in texts)  # of the words of each text
        return "tokens" if parts or are_tags else "classification"
    are_whole = all(map(_INTEGER.fullmatch, [*texts, *filter(_NUMBER.fullmatch, others)]))
    return "classification" if are_whole else "regression"


def _classification(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    (gold_names,) = _class_names([[*map(label_text, gold.values)]], order)
    if unlabeled := gold_names.count(""):
        raise UserError("--gold", gold.file, f"has no label for {quantity(unlabeled, 'example', ',')}", "Add them.")
    names = {*gold_names, *(name for file in files for name in file.names)}
    classes = [*order] or sorted(names, key=lambda name: (len(name), name) if name.isdigit() else (99, name))
    if metric in OF_SECOND_CLASS and (len(classes) != 2 or not (order or classes == ["0", "1"])):
        problem = f"is of the second of two classes, and there are {short_list(classes)}"
        raise UserError("--metric", metric, problem, IN_ORDER)
    if other := [*({*gold_names} - {*classes})]:
        raise UserError("--labels", ",".join(order), f"lacks {short_list(other)} of {gold.file}", "Name all classes.")
    number, predicted, remarks = {name: place for place, name in enumerate(classes)}, [], []
    for file in files:
        (texts,), remark = _class_names([[*map(label_text, file.values)]], order), ""
        if file.scores is not None and (metric in OF_PROBABILITIES or not texts):
            outputs, remark = _logits(metric, file, classes, bool(order))
        elif metric in OF_PROBABILITIES:
            raise UserError("--metric", metric, f"needs scores of the classes, and {file.file} has none")
        else:
            remark = _strays(file, texts, number, gold)
            outputs = np.eye(len(classes) + bool(remark))[[number.get(text, len(classes)) for text in texts]]
        predicted.append(outputs)
        remarks.append(remark)
    width, labels = max(own.shape[1] for own in predicted), np.array([number[name] for name in gold_names])
    scored = []
    for own, remark in zip(predicted, remarks, strict=True):
        outputs = np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=own.min() - 1)
        counts = SUMMED["f1_macro"][0](outputs, labels).reshape(len(labels), 3, -1)
        by_label = {name: counts[:, :, place] for name, place in number.items()}
        scored.append(Scored(Predictions("outputs", outputs, labels), outputs.argmax(axis=1), by_label, remark))
    return scored


def _class_names(rows: list[list[str]], order: Sequence[str]) -> list[list[str]]:
    """Return labels as names; if all of them are numbers, they stand for the names of ``order``."""
    numbers = {f"{mark}{place}": name for place, name in enumerate(order) for mark in ("", "LABEL_")}
    numbers |= {name: name for name in order if name in numbers}
    is_numbered = numbers and {text for row in rows for text in row} <= numbers.keys()
    return [[numbers[text] for text in row] for row in rows] if is_numbered else rows


def _strays(file: Values, labels: Sequence[str], classes: Collection[str], gold: Values) -> str:
    """Return a remark on labels that the gold file lacks, if there are any.

    Raises:
        UserError: all labels are of this kind.
    """
    strays = Counter(label for label in labels if label not in classes)
    if strays and strays.total() == len(labels):
        problem = f"has the labels {short_list([*strays])}, and {gold.file} has {short_list([*classes])}"
        remedy = "Write them as there, or name the classes in the order of numbers: --labels no,yes"
        raise UserError("--predictions", file.file, problem, remedy)
    text = f"; {strays.total():,} labels that {gold.file} lacks count as wrong, such as '{next(iter(strays), '')}'"
    return text if strays else ""


def _logits(metric: str, file: Values, classes: Sequence[str], is_ordered: bool) -> tuple[np.ndarray, str]:
    """Return the scores of a file in the order of the classes, probabilities as their logarithms, and what they are.

    Raises:
        UserError: there is another number of columns, nothing says which column is which class, or what scores are.
    """
    scores, numbers = np.asarray(file.scores, dtype=np.float64), [*map(str, range(len(classes)))]
    names = [*classes] if is_ordered and [*file.names] == numbers else [*file.names]
    if {*names} != {*classes} or len(names) != scores.shape[1]:
        problem = f"has scores of {scores.shape[1]} classes, and nothing says which is which of {short_list(classes)}"
        raise UserError("--predictions", file.file, problem, IN_ORDER)
    scores = scores[:, [names.index(name) for name in classes]]
    logs, is_valid, remarks = OneClass().logits(scores)
    if is_valid.all():
        return logs, ", ".join([", probabilities", *remarks])
    if metric in OF_PROBABILITIES and scores.min() >= 0:
        problem = f"has scores of 0 and more that do not sum to 1, so {metric} has no probabilities"
        raise UserError("--predictions", file.file, problem, "Write probabilities or logits of all classes.")
    return scores, ", logits"


def _regression(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    numbers = []
    for file in (gold, *files):
        texts = [label_text(value) for value in file.values]
        if not texts or (other := next((text for text in texts if not _NUMBER.fullmatch(text)), None)) is not None:
            problem = f"has '{other}', which is no finite number" if texts else "has no column of numbers"
            raise UserError("--predictions", file.file, problem, "Repair it, or of labels: --type classification")
        numbers.append(np.array(texts, dtype=np.float64))
    return [Scored(Predictions("outputs", own[:, None], numbers[0]), own) for own in numbers[1:]]


def _tokens(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    """Score the entities of tags of words, or spans of characters."""

    def row(value: Any) -> list[Any]:
        parts = value.split() if isinstance(value, str) else value or ()
        return [one if isinstance(one, str | dict) else label_text(one) for one in parts]

    def span(one: Any) -> tuple[Any, ...]:
        return one.get("start"), one.get("end"), one.get("label", one.get("entity_group"))

    rows = [[*map(row, file.values)] for file in (gold, *files)]
    kinds = [any(isinstance(one, dict) for value in own for one in value) for own in rows]
    rows = [own if kind else _class_names(own, order) for own, kind in zip(rows, kinds, strict=True)]
    tags = [tag for own, has_spans in zip(rows, kinds, strict=True) if not has_spans for value in own for tag in value]
    tagset, parts = TagSet.from_names(complete_names(tags) or ["O"]), list[list[set[Any]]]()
    for file, own, has_spans in zip((gold, *files), rows, kinds, strict=True):
        problem, sizes = "", [*map(len, own)]
        if has_spans != kinds[0] and any(sizes):
            problem = f"has {'spans' if has_spans else 'tags'}, unlike {gold.file}: distill-run predict --out x.conll"
        elif not has_spans and sizes != [*map(len, rows[0])] and not kinds[0]:
            place = next(place for place, size in enumerate(sizes) if size != len(rows[0][place]))
            problem = f"has {sizes[place]} tags in row {place}, and {gold.file} has {len(rows[0][place])}"
        spans = [set(map(span, value)) for value in own if has_spans]
        if any(None in one for value in spans for one in value):
            problem = "has spans that lack a start, an end or a label"
        if problem:
            raise UserError("--predictions", file.file, problem, "Predict tags of all words, or spans as in the data.")
        if has_spans or kinds[0]:
            parts.append(spans or [set() for _ in own])
            continue
        bounds, sets = np.cumsum([0, *sizes]), [set[Any]() for _ in own]
        numbers = np.array([tagset.number[tag] for value in own for tag in value], dtype=np.int64)
        for first, last, kind in tagset.entities(numbers, bounds).tolist():
            sets[int(np.searchsorted(bounds, first, side="right")) - 1].add((first, last, tagset.type_names[kind]))
        parts.append(sets)
    return _of_sets(metric, parts)


def _multilabel(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    parts, classes, remarks = list[list[set[Any]]](), {*order}, list[str]()
    for file in (gold, *files):
        by_mark = {mark: _class_names(_label_lists(file.values, mark), order) for mark in SEPARATORS}
        # Gold labels may be one text; those of the others are divided as gives most of the gold labels.
        fits = {mark: sum(one in classes for row in rows for one in row) for mark, rows in by_mark.items()}
        used = [mark for mark in SEPARATORS if any(isinstance(v, str) and mark in v for v in file.values)]
        mark = max(fits, key=lambda mark: fits[mark]) if parts else next(iter(used), SEPARATORS[0])
        labels = [one for row in by_mark[mark] for one in row]
        classes |= set() if parts else {*labels}
        remarks.append((f", divided by '{mark}'" if mark in used else "") + _strays(file, labels, classes, gold))
        parts.append([{(one,) for one in row} for row in by_mark[mark]])
    return [replace(one, remark=remark) for one, remark in zip(_of_sets(metric, parts), remarks[1:], strict=True)]


def _label_lists(values: Sequence[Any], mark: str) -> list[list[str]]:
    """Return the labels of each example: of a list, as text too, of a flag for each label, or of a text with marks."""

    def items_of(value: Any) -> list[Any]:
        if not isinstance(value, str):
            return value if isinstance(value, list) else [value]
        own = printed_value(value) if value.startswith("[") else None
        return own if isinstance(own, list) else value.strip("[]").split(mark)

    rows = [[*filter(None, map(label_text, items_of(value)))] for value in values]
    sizes, are_binary = {len(row) for row in rows}, all({*row} <= {"0", "1"} for row in rows)
    if are_binary and len(sizes) == 1 and any(len({*row}) < len(row) for row in rows):
        return [[str(number) for number, flag in enumerate(row) if flag == "1"] for row in rows]
    return rows


def _of_sets(metric: str, parts: Sequence[Sequence[set[Any]]]) -> list[Scored]:
    """Score sets (N,) of tuples that end in a label; the first part is gold."""
    names = sorted({one[-1] for own in parts for of_example in own for one in of_example})
    number, gold, scored = {name: place for place, name in enumerate(names)}, parts[0], []
    for own in parts[1:]:
        counts = np.zeros((len(gold), len(names), 3))
        for row, (right, predicted) in enumerate(zip(gold, own, strict=True)):
            for column, part in enumerate((right & predicted, predicted, right)):
                for one in part:
                    counts[row, number[one[-1]], column] += 1
        columns = {"precision": [0, 1, 1], "recall": [0, 2, 2]}.get(metric, [0, 1, 2])
        summed = counts.reshape(len(gold), -1) if metric == "f1_macro" else counts.sum(axis=1)[:, columns]
        predictions = Predictions("counts", summed, np.arange(len(gold)))
        if metric == "subset_accuracy":
            equal = np.array([right == one for right, one in zip(gold, own, strict=True)], dtype=np.float64)
            predictions = Predictions("score", equal, np.arange(len(gold)))
        scored.append(Scored(predictions, own, {name: counts[:, place] for name, place in number.items()}))
    return scored


def _questions(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    """Score answers by SQuAD's rules; gold answers are written as in its files, as on the hub, or as plain texts."""
    golds = [value["text"] if isinstance(value, dict) else value for value in gold.values]
    golds = [value if isinstance(value, list) else [value] for value in golds]
    texts = [[str(one["text"] if isinstance(one, dict) else one or "") for one in value] for value in golds]
    clusters = np.unique(gold.contexts or np.arange(len(texts)), return_inverse=True)[1]
    scored = []
    for file in files:
        answers = [str(value or "") for value in file.values]
        exact, f1 = question_scores(answers, texts, None, not all(map(any, texts)))
        predictions = Predictions("score", exact if metric == "exact_match" else f1, clusters)
        scored.append(Scored(predictions, [*map(normalize_answer, answers)]))
    return scored


def _retrieval(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    gains = dict(zip(gold.ids or (), gold.values, strict=True))
    scored, queries = [], [query for query, gain_of in gains.items() if max(gain_of.values()) > 0]
    useless = len(gains) - len(queries)
    for file in files:
        score_of = dict(zip(file.ids or (), file.values, strict=True))
        missing, unjudged = len({*queries} - score_of.keys()), len(score_of.keys() - gains.keys())
        if missing == len(queries):
            problem = f"ranks none of the queries of {gold.file}, such as '{next(iter(gains))}'"
            raise UserError("--predictions", file.file, problem, "Compare rankings of the same queries.")
        # The order of trec_eval: by score in single precision; of equal scores, the last id comes first.
        pairs = [[(np.float32(score), one) for one, score in score_of.get(query, {}).items()] for query in queries]
        ranked = [[one for _, one in sorted(own, reverse=True)] for own in pairs]
        values = [ranking_scores(gains[query], own)[metric] for query, own in zip(queries, ranked, strict=True)]
        notes = {f"{missing:,} of {len(queries):,} judged queries are not ranked, and count 0": missing}
        notes |= {f"{unjudged:,} queries without judgments left out": unjudged}
        notes |= {f"{useless:,} judged queries without a relevant document left out": useless}
        remark = "".join(f"; {text}" for text, count in notes.items() if count)
        predictions = Predictions("score", np.array(values), np.arange(len(values)))
        scored.append(Scored(predictions, [own[:1] for own in ranked], remark=remark))
    return scored


TYPES: Mapping[str, tuple[Sequence[str], Callable[..., list[Scored]]]] = {
    "classification": ([*CLASSIFICATION_METRICS], _classification),
    "regression": ([*REGRESSION_METRICS], _regression),
    "multilabel": (("f1_micro", "f1_macro", "subset_accuracy"), _multilabel),
    "tokens": (("f1", "precision", "recall", "f1_macro"), _tokens),
    "questions": (("f1", "exact_match"), _questions),
    "retrieval": (("ndcg_at_10", "mrr_at_10", "recall_at_100", "ndcg", "map", "mrr"), _retrieval),
}
"""Task types: metrics, of which the first is the default, and what files hold."""
