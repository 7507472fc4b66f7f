"""What files of predictions and of gold labels say, as any program writes them.

Read are the forms of docs/compare.md: tables with named columns (pandas, scikit-learn, ``distill-run predict``, a
language model), run_glue's and run_ner's ``.txt``, run_qa's answers by id, TREC runs and qrels, and
sentence-transformers' rankings. What was taken is a sentence of the file; what can be taken in two ways is refused.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import ne
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from distill_runner.common.errors import UserError, listed_names, require_file
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.readers.content import open_split
from distill_runner.datasets.readers.formats import require_format
from distill_runner.models.config import normalized_label
from distill_runner.tasks.columns import as_lists, by_label
from distill_runner.tasks.decoding import OneClass
from distill_runner.tasks.multilabel import flag_of
from distill_runner.tasks.scores import class_of_column, read_answer

ROW_NUMBERS = ("index", "", "unnamed: 0", "__index_level_0__")
"""Names of columns that programs fill with the numbers of the rows; pandas writes its index without a name."""
IDS = ("id", "index", "idx", "guid", *ROW_NUMBERS[1:])
"""Names of columns of ids, in any letter case, the first of which is taken."""
PREDICTED = ("prediction", "predictions", "predicted", "predicted_label", "pred", "y_pred", "prediction_text")
LABELS = ("label", "labels", "gold", "target", "y_true", "answers", "answer", "ner_tags", "tags", "spans")
SAME_FLAG = {"0": "false", "1": "true", "false": "0", "true": "1"}
PREFIX = "p_"
"""Of columns of the probability of a class, as ``distill-run predict`` writes them."""
RENAME = "Name one column prediction, or label in the gold file; scores p_<class>; rankings query-id, corpus-id, score."
ID_OR_ORDER = "Name the column id, in both files, or remove it for the order."
SAME_EXAMPLES = "Compare predictions of the same examples; those of files without ids have the order of the gold file."
TREC = "Lines of rankings are query Q0 document rank score name, those of qrels query 0 document relevance."
Columns = Mapping[str, list[Any]]
_RUN = re.compile(r"\S+\s+(Q0|q0|0)\s+\S+\s+\d+\s+\S+\s+\S+")
_QRELS = re.compile(r"\S+\s+\S+\s+\S+\s+-?\d+(\.0)?")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _ComparedFile(CorpusPart):
    """A file of data, which is CoNLL in ``.tsv`` too, as flair writes it, if each line has a word and its tags."""

    has_words = True


@dataclass(frozen=True)
class Values:
    """What a file says of N examples.

    Attributes:
        ids: of the examples; None if the file has none, so that its order counts.
        values: a label, number, answer or list for each; a tuple, the names of columns of flags that are set; scores of
            documents by their ids for rankings; empty if there are only ``scores``.
        scores: (N, C), probabilities or logits; None without.
        names: classes of the columns of scores, or those that numbers stand for; empty if the file does not name them.
        columns: texts of the columns that are none of these, by name, such as ``context``.
        may_be_rows: whether the ids may be the numbers of the rows.
        text: what was taken.
    """

    file: Path
    ids: list[str] | None
    values: list[Any]
    scores: np.ndarray | None = None
    names: Sequence[str] = ()
    columns: Mapping[str, list[str]] = field(default_factory=dict)
    may_be_rows: bool = False
    text: str = ""

    def in_order_of(self, gold: "Values") -> "Values":
        """Return the examples in the order of ``gold``, whose ids are the numbers of its rows if it has none.

        Raises:
            UserError: the ids are not those of ``gold``, one occurs twice, or they may be the numbers of the rows.
        """
        rows = [*map(str, range(len(gold.values)))]
        expected = rows if gold.ids is None else gold.ids
        if self.ids is None or (self.ids == rows and (gold.ids is None or {*expected} != {*rows})):
            if (size := len(self.values if self.scores is None else self.scores)) != len(rows):
                problem = f"has {size:,} rows, and {gold.file} has {len(rows):,}"
                raise UserError("--predictions", self.file, problem, SAME_EXAMPLES)
            text = f"{self.text}, in the order of the rows"
            for name, own in self.columns.items():  # columns of few values say nothing of the order
                of_gold = gold.columns.get(name, gold.ids or own)
                if own != of_gold and 2 * len({*own}) > len(own) and sorted(own) == sorted(of_gold):
                    problem = f"has the column '{name}' in another order than {gold.file}, and not as ids"
                    raise UserError("--predictions", self.file, problem, ID_OR_ORDER)
                other = sum(map(ne, own, of_gold)) if name in gold.columns else 0
                text += f", but '{name}' differs from {gold.file} in {other:,} of {len(rows):,}" if other else ""
            return replace(self, text=text)
        if self.may_be_rows and self.ids == rows != expected:
            problem = f"numbers its rows, which may be their order, or ids that {gold.file} has in another order"
            raise UserError("--predictions", self.file, problem, ID_OR_ORDER)
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

    def with_classes(self, classes: Sequence[str]) -> "Values":
        """Return the values with those in another spelling of a class as the class, by the rule of ``task.answers``.

        If classes differ only in case, or in the mark between words, the values stay as they are.
        """
        class_of = {normalized_label(name): name for name in classes}
        if len(class_of) < len(classes):
            return self
        if class_of.keys() <= SAME_FLAG.keys():
            class_of |= {SAME_FLAG[flag]: name for flag, name in class_of.items()}
        answers = [read_answer(value, class_of) for value in self.values]
        values = [x if isinstance(x, list) else class_of.get(normalized_label(label_text(x)), x) for x in answers]
        variants = [one for one, own in zip(self.values, values, strict=True) if label_text(one) != label_text(own)]
        if not variants:
            return self
        text = f"{self.text}; {len(variants):,} in another spelling, such as {str(variants[0])[:40]!r}"
        return replace(self, values=values, text=text)


def label_text(value: Any) -> str:
    """Return a label as text: a whole number without decimals, as CSV and JSON may write it in two ways."""
    if isinstance(value, bool):
        value = int(value)
    text = normalize("NFC", "" if value is None else str(value).strip())
    is_whole = re.fullmatch(r"-?\d+\.\d+(e[-+]\d\d)?", text) and float(text).is_integer()
    return str(int(float(text))) if is_whole else text


def read_values(file: Path, key: str, classes: Sequence[str] = (), gold_columns: Collection[str] = ()) -> Values:
    """Read a file of predictions, or of gold labels.

    Args:
        key: ``--predictions`` or ``--gold``.
        classes: labels of the gold file, which name columns of scores.
        gold_columns: other columns of the gold file, which are no predictions.
    Raises:
        UserError: the file cannot be read, or could be read in several ways.
    """
    require_file(key, file)
    try:
        return _parse(file, key, classes, gold_columns)
    except (ValueError, TypeError, IndexError, EOFError) as error:
        raise UserError(key, file, f"cannot be read: {error}") from error


def _parse(file: Path, key: str, classes: Sequence[str], gold_columns: Collection[str]) -> Values:
    is_text = file.suffix not in (".parquet", ".arrow", ".gz", ".zip", ".npy")
    content = file.read_text(encoding="utf-8-sig", errors="replace") if is_text else ""
    first, lines = content.lstrip().partition("\n")[0].strip(), content.removesuffix("\n").split("\n")
    rows = [line.split() for line in lines if line.strip()] if _RUN.match(first) or _QRELS.match(first) else []
    if _RUN.fullmatch(first) or (key == "--gold" and rows and all(_QRELS.fullmatch(" ".join(row)) for row in rows)):
        return _rankings(file, ((row[0], row[2], row[-2] if len(row) > 4 else row[-1]) for row in rows))
    if file.suffix == ".txt" and "\t" not in first:
        return Values(file, None, lines, text="a line for each example")
    if first.startswith("{") and file.suffix == ".json":
        if (answers := _answers(by_id := json.loads(content))) is not None:
            return Values(file, [*answers], [*answers.values()], text="answers by id")
        if all(map(is_scores, by_id.values())) and not all("0" in own for own in by_id.values()):  # pandas has rows
            return _rankings(file, ((query, *pair) for query, own in by_id.items() for pair in own.items()))
        if all(isinstance(own, dict) for own in by_id.values()) and {*chain(*by_id.values())} & {*PREDICTED, *LABELS}:
            by_row = [{"id": one, **own} for one, own in by_id.items()]
            by_name = {name: [row.get(name) for row in by_row] for name in dict.fromkeys(chain(*by_row))}
            return _of_columns(file, key, by_name, {}, classes, gold_columns)
    class_names: Columns = {}
    are_lists = file.suffix.startswith(".json") and len(lines) > 1 and first[:1] + first[-1:] == "[]"  # one a line
    if are_lists or file.suffix == ".npy" or (file.suffix == ".json" and re.match(r"\s*\[\s*[^{\s]", content)):
        text = f"[{','.join(filter(str.strip, lines))}]" if are_lists else content
        listed = json.loads(text) if is_text else np.load(file).tolist()
        return _of_columns(file, key, {"label": listed}, class_names, classes, gold_columns)
    if is_text:
        require_format(key, file, TREC)
    if file.suffix == ".txt":  # as run_glue writes
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        records, names = [*table], list(table.fieldnames or ())
        if any(None in record.values() for record in records):
            raise UserError(key, file, "has a line with too few columns", "Write the file again.")
    else:
        try:
            with open_split(_ComparedFile(dataset=str(file), columns=["text"]), "train") as split:
                records, names, class_names = [*split.rows()], split.column_names, split.class_names
        except UserError as error:
            remedy = "Save it as UTF-8." if ".encoding=" in error.remedy else error.remedy
            raise UserError(key, file, error.problem, remedy) from error
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in records] for name in names}
    labels, scores = (as_lists(columns.get(name, [])) for name in ("labels", "scores"))
    is_listed = bool(labels and scores) and all(isinstance(one, list) for one in (*labels, *scores))
    if key == "--predictions" and is_listed and len({frozenset(map(str, one)) for one in labels}) == 1:
        # Pipelines of zero-shot classification write all labels in the order of their scores.
        columns["labels"] = [dict(zip(*pair, strict=True)) for pair in zip(labels, scores, strict=True)]
    if {"query-id", "corpus-id", "score"} <= columns.keys():  # qrels of the hub
        return _rankings(file, ((row["query-id"], row["corpus-id"], row["score"]) for row in records))
    if {"query_id", "results"} <= columns.keys():  # sentence-transformers' rankings
        pairs = zip(columns["query_id"], columns["results"], strict=True)
        return _rankings(file, ((query, one["corpus_id"], one["score"]) for query, own in pairs for one in own))
    return _of_columns(file, key, columns, class_names, classes, gold_columns)


def _answers(values: Any) -> dict[str, Any] | None:
    """Return the answers in an object of answers, or of the n best ones, by id, as run_qa writes; else None."""
    scalars = str | int | float
    try:
        best = {key: value if isinstance(value, scalars) else value[0]["text"] for key, value in values.items()}
    except (LookupError, TypeError, AttributeError):
        return None
    return best if all(isinstance(answer, scalars) for answer in best.values()) else None


def is_scores(value: Any) -> bool:
    """Return whether a value is an object of numbers by the names of classes, or of documents."""
    return isinstance(value, dict) and bool(value) and all(isinstance(one, int | float) for one in value.values())


def _of_columns(
    file: Path, key: str, columns: Columns, class_names: Columns, classes: Sequence[str], gold_columns: Collection[str]
) -> Values:
    id_name = next((name for one in IDS for name in columns if name.casefold() == one), None)
    ids = None if id_name is None else [*map(label_text, columns[id_name])]
    others = [name for name in columns if name != id_name]
    way, class_of = _columns_of_scores(others, classes)
    values_of = chain(*(columns[name] for name in class_of)) if way == "end" else ()
    if any(flag_of(value) is None and not NUMBER.fullmatch(label_text(value)) for value in values_of):
        way, class_of = "", {}  # columns of texts
    scored = [*class_of]
    scores = np.array([[*map(_number, columns[name])] for name in scored], dtype=np.float64).T if scored else None
    groups = (() if key == "--gold" else PREDICTED, LABELS, ("score",))
    choices = [[name for name in others if name.casefold() in group] for group in groups]
    unnamed = [name for name in others if name not in chain(*choices)]
    rest = [name for name in unnamed if way in ("class", "end") and name not in scored]
    rest = [name for name in rest if all(NUMBER.fullmatch(label_text(value)) for value in columns[name])]
    # A class that no example has, or a number of another kind.
    if rest and scores is not None and not OneClass().logits(scores)[1].all():
        problem = f"has scores of {listed_names(scored)}, and maybe of {listed_names(rest)}, which no gold label is"
        raise UserError(key, file, problem, f"Name all columns of scores {PREFIX}<class>.")
    choices += [] if scored else [[name for name in unnamed if name not in gold_columns], unnamed]
    candidates = next(filter(None, choices), [])
    flags = [name for name in candidates if candidates == others and None not in map(flag_of, columns[name])]
    if len(flags) > 1 and (key == "--gold" or {*flags} & {*classes}):
        rows = [[name for name in flags if flag_of(columns[name][row])] for row in range(len(columns[flags[0]]))]
        is_one_hot, candidates = {*map(len, rows)} == {1}, [", ".join(flags)]
        columns = {**columns, candidates[0]: [row[0] if is_one_hot else tuple(row) for row in rows]}
    if len(candidates) > 1 or not (candidates or scored):
        where = "in its first line " if any(map(NUMBER.fullmatch, columns)) else ""
        problem = f"has {where}the columns {listed_names(candidates or [*columns])}: which one is meant?"
        remedy = f"{RENAME}{' Without names, add such a line.' if where else ''}"
        raise UserError(key, file, problem, remedy if {*candidates} <= {*unnamed} else "Keep one of these columns.")
    values = as_lists(columns[candidates[0]], list | dict) if candidates else []
    by_class = [*map(by_label, values)]
    numbers = (lists_of_numbers(values) if key == "--predictions" else None) or []
    if any(one % 1 for row in numbers for one in row):  # whole ones may be labels
        is_one = len(numbers[0]) == 1
        values = [row[0] for row in numbers] if is_one else values
        by_class = [] if is_one else [{str(place): one for place, one in enumerate(row)} for row in numbers]
    if key == "--predictions" and by_class and all(map(is_scores, by_class)):
        if {*map(len, by_class)} != {1} and any(own.keys() != by_class[0].keys() for own in by_class):
            raise UserError(key, file, "lacks scores of some classes in some rows", "Predict those of all classes.")
        way, scored = "key", [*by_class[0]] if len(by_class[0]) > 1 else []
        values = [] if scored else [*chain(*by_class)]
        scores = np.array([[own[name] for name in scored] for own in by_class], dtype=np.float64) if scored else None
    if scores is not None and not np.isfinite(scores).all():
        raise ValueError(f"a score in the columns {listed_names(scored)} is missing or not finite")
    if labels := class_names.get(candidates[0], []) if candidates else []:
        name_of = dict(enumerate(labels)).get  # None for -1, which is "no label" on the hub
        values = [[*map(name_of, value)] if isinstance(value, list) else name_of(value) for value in values]
    taken = {"ids": id_name, "column": next(iter(candidates), None), "scores from": next(iter(scored), None)}
    text = ", ".join(f"{what} '{name}'" for what, name in taken.items() if name is not None)
    names = [class_of.get(name, name) for name in scored]
    rest = [name for name in others if name not in (*candidates, *flags, *scored)]
    texts = {name: [*map(str, columns[name])] for name in rest}
    return Values(file, ids, values, scores, names or labels, texts, str(id_name).casefold() in ROW_NUMBERS, text)


def _columns_of_scores(names: Sequence[str], classes: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return how columns name classes, and the classes of those that do; without such columns, nothing."""
    ways = {"prefix": {name: name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}}
    ways |= {"number": {name: name for name in names if classes and name.isdigit()}}
    ways |= {"class": {name: name for name in classes}}
    for own in (classes, [*map(str, range(len(classes)))]) if len(classes) <= len(names) else ():
        ends = {name: own[number] for name in names if (number := class_of_column(name, own)) is not None}
        if sorted(ends.values()) == sorted(own):  # such as prob_no and prob_yes, or LABEL_0 and LABEL_1
            ways.setdefault("end", ends)
    return next(((way, own) for way, own in ways.items() if len(own) > 1 and own.keys() <= {*names}), ("", {}))


def _number(value: Any) -> float:
    """Return a score, or 1 and 0 of a column of flags; NaN for none."""
    flag = flag_of(value)
    return float("nan" if value in (None, "") else value if flag is None else flag)


def lists_of_numbers(values: Sequence[Any]) -> list[list[float]] | None:
    """Return lists of one length that hold numbers, also where each is alone in a list; None for other values."""
    rows = [one[0] if isinstance(one, list) and [*map(type, one)] == [list] else one for one in values]
    if not all(isinstance(row, list) and row for row in rows) or len({*map(len, rows)}) != 1:
        return None
    return rows if all(isinstance(one, int | float) for row in rows for one in row) else None


def _rankings(file: Path, rows: Iterable[tuple[Any, Any, Any]]) -> Values:
    """Return the documents of each query with their scores, of rows of query, document and score."""
    by_query: dict[str, dict[str, float]] = {}
    for query, document, score in rows:
        documents = by_query.setdefault(str(query), {})
        if str(document) in documents or np.isnan(number := float(score)):
            raise ValueError(f"query '{query}' has the document '{document}' twice, or without a score")
        documents[str(document)] = number
    return Values(file, [*by_query], [*by_query.values()], text=f"documents of {len(by_query):,} queries")
