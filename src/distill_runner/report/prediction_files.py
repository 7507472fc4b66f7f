"""Predictions of any program in files, and the gold labels beside them: what each example has, by its id.

Read are tables with named columns; ``.npy`` of labels or scores; ``.txt`` with a line for each example, as run_ner of
``transformers`` writes; answers by id, as run_qa writes; TREC runs and qrels, and sentence-transformers' rankings. What
was taken is a sentence of the file, and what can be taken in two ways is refused.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.readers.tables import listed_names, open_split

IDS = ("id", "index", "idx", "guid", "", "Unnamed: 0")
"""Names of columns of ids, the first of which is taken; pandas writes its index without a name."""
PREDICTED = ("prediction", "predictions", "predicted", "predicted_label", "pred", "y_pred", "prediction_text")
LABELS = ("label", "labels", "gold", "target", "y_true", "answers", "answer", "ner_tags", "tags", "spans")
SCORES = ("probabilities", "logits", "scores")
"""Names of columns that hold a list of numbers for each example, one a class."""
PREFIX = "p_"
"""Of columns of the probability of a class, as ``distill-run predict`` writes them."""
RENAME = "Name one column prediction in files of predictions, and label in the gold file."
SAME_EXAMPLES = "Compare predictions of the same examples; those of files without ids have the order of the gold file."
BY_EPOCH = "has the scores of sentence-transformers by epoch, and no predictions"
SAVE = "Save what model.predict returns, or rankings with write_predictions=True."
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
        text: what was taken.
    """

    file: Path
    ids: list[str] | None
    values: list[Any]
    scores: np.ndarray | None = None
    names: Sequence[str] = ()
    contexts: Sequence[str] | None = None
    text: str = ""

    def in_order_of(self, gold: "Values") -> "Values":
        """Return the examples in the order of ``gold``, whose ids are the numbers of its rows if it has none.

        Raises:
            UserError: the ids are not those of ``gold``, or one occurs twice.
        """
        rows = [*map(str, range(len(gold.values)))]
        expected = rows if gold.ids is None else gold.ids
        if self.ids is None or (self.ids == rows and {*expected} != {*rows}):
            if (size := len(self.values if self.scores is None else self.scores)) != len(rows):
                problem = f"has {size:,} rows, and {gold.file} has {len(rows):,}"
                raise UserError("--predictions", self.file, problem, SAME_EXAMPLES)
            return replace(self, text=f"{self.text}, in the order of the rows")
        sides = (self.file, self.ids, gold.file, {*expected}), (gold.file, expected, self.file, {*self.ids})
        for key, (file, ids, other, others) in zip(("--predictions", "--gold"), sides, strict=True):
            lacking, place = [one for one in ids if one not in others], {one: row for row, one in enumerate(ids)}
            if len(place) < len(ids):
                twice = next(one for row, one in enumerate(ids) if place[one] > row)
                raise UserError(key, file, f"has the id '{twice}' twice", "Give each example its own.")
            if lacking:
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
    text = str(int(value) if isinstance(value, bool) else "" if value is None else value).strip()
    return text[:-2] if re.fullmatch(r"-?\d+\.0", text) else text


def read_values(file: Path, key: str, classes: Sequence[str] = ()) -> Values:
    """Read a file of predictions, or of gold labels.

    Args:
        key: ``--predictions`` or ``--gold``.
        classes: labels of the gold file, which name columns of scores.
    Raises:
        UserError: the file cannot be read, or could be read in several ways.
    """
    if not file.is_file():
        raise UserError(key, file, "there is no such file")
    try:
        return _parse(file, key, classes)
    except ValueError as error:
        raise UserError(key, file, f"cannot be read: {error}") from error


def _parse(file: Path, key: str, classes: Sequence[str]) -> Values:
    if file.suffix == ".npy":
        array = np.load(file)
        is_table = array.ndim == 2 and array.shape[1] > 1
        return Values(file, None, [] if is_table else array.ravel().tolist(), array if is_table else None, text="array")
    is_text = file.suffix not in (".parquet", ".arrow", ".gz", ".zip")
    content = file.read_text(encoding="utf-8-sig", errors="replace") if is_text else ""
    first = content.lstrip().partition("\n")[0].strip()
    if _RUN.fullmatch(first) or (key == "--gold" and _QRELS.fullmatch(first)):
        rows = [line.split() for line in content.splitlines() if line.strip()]
        return _rankings(file, ((row[0], row[2], row[-2] if len(row) > 4 else row[-1]) for row in rows))
    if file.suffix == ".txt" and "\t" not in first:
        return Values(file, None, content.splitlines(), text="a line for each example")
    if first.startswith("{") and file.suffix == ".json" and (answers := _answers(content)) is not None:
        return Values(file, [*answers], [*answers.values()], text="answers by id")
    class_names: Mapping[str, list[str]] = {}
    if file.suffix == ".txt":  # as run_glue writes
        table = csv.DictReader(content.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
        records, names = [*table], list(table.fieldnames or ())
    else:
        try:
            with open_split(CorpusPart(dataset=str(file), columns=["text"]), "train") as split:
                records, names, class_names = [*split.rows()], split.column_names, split.class_names
        except UserError as error:
            raise UserError(key, file, error.problem, error.remedy) from error
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in records] for name in names}
    if {"epoch", "steps"} <= columns.keys():
        raise UserError(key, file, BY_EPOCH, SAVE)
    if {"query-id", "corpus-id", "score"} <= columns.keys():  # BEIR's qrels
        return _rankings(file, zip(columns["query-id"], columns["corpus-id"], columns["score"], strict=True))
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
    sets = prefixed, [*classes], [*map(str, range(len(classes)))]
    of_classes = next((own for own in sets if len(own) > 1 and {*own} <= {*others}), [])
    scored = of_classes or [name for name in SCORES if name in others][:1]
    scores = np.column_stack([columns[name] for name in scored]).astype(np.float64) if scored else None
    groups = (() if key == "--gold" else PREDICTED, LABELS, ("score",), () if scored else others)
    candidates = next(filter(None, ([name for name in group if name in others] for group in groups)), [])
    if len(candidates) > 1 or not (candidates or scored):
        problem = f"has the columns {listed_names(candidates or [*columns])}: which one is meant?"
        raise UserError(key, file, problem, RENAME)
    values = columns[candidates[0]] if candidates else []
    if labels := class_names.get(candidates[0], []) if candidates else []:
        name_of = dict(enumerate(labels)).get  # None for -1, which is "no label" on the hub
        values = [[*map(name_of, value)] if isinstance(value, list) else name_of(value) for value in values]
    taken = (("ids", id_name), ("column", *candidates[:1]), ("scores from", *scored[:1]))
    text = ", ".join(f"{what} '{name[0]}'" for what, *name in taken if name and name[0] is not None)
    names = [name.removeprefix(PREFIX) for name in of_classes] if of_classes is prefixed else of_classes
    return Values(file, ids, values, scores, names or labels, columns.get("context"), text)


def _rankings(file: Path, rows: Iterable[tuple[Any, Any, Any]]) -> Values:
    """Return the documents of each query with their scores, of rows of query, document and score."""
    by_query: dict[str, dict[str, float]] = {}
    for query, document, score in rows:
        by_query.setdefault(str(query), {})[str(document)] = float(score)
    return Values(file, [*by_query], [*by_query.values()], text=f"documents of {len(by_query):,} queries")
