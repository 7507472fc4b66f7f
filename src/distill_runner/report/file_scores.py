"""From what files say to predictions that can be compared, by task type.

A file becomes the predictions of a run: outputs with gold labels, counts of sets, or scores of examples.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, quantity, short_list
from distill_runner.datasets import metrics
from distill_runner.report.compare import Predictions
from distill_runner.report.prediction_files import NUMBER, RENAME, Values, label_text, lists_of_numbers
from distill_runner.tasks.columns import printed_value
from distill_runner.tasks.decoding import OneClass
from distill_runner.tasks.questions.answers import normalize_answer, question_scores
from distill_runner.tasks.tokens.sentences import span_parts
from distill_runner.tasks.tokens.tags import TagSet, complete_names, spelled_parts
from distill_runner.tasks.vectors.retrieval import ranking_scores

SEPARATORS = (";", "|", ",")
"""Marks between the labels of a text, the first of which is taken where gold labels have several."""
IN_ORDER = "Name the classes in the order of their numbers: --labels no,yes"
TAGS_OF_NUMBERS = "Name the tags in their order: --labels O,B-PER,I-PER; in both files, leave out words with -100."
_TAGS = re.compile(r"((^| +)(O|[BIMELSU]-\S+))+")
_INTEGER = re.compile(r"[-+]?\d+")


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


def type_of(gold: Values, sample: Values) -> str:
    """Return the task type that gold labels look like.

    Raises:
        UserError: they can be of two.
    """
    if isinstance(gold.values[0], dict):
        return "questions" if "text" in gold.values[0] else "retrieval"
    parts = [one for value in gold.values if isinstance(value, list) for one in value]
    if isinstance(gold.values[0], tuple):
        return "multilabel"
    if any(isinstance(one, dict | list) for one in parts):
        return "questions" if any("answer_start" in one for one in parts) else "tokens"
    if parts and not any(spelled_parts(str(one)) for one in parts):
        problem = "has lists, of tags of words or of labels of a text"
        raise UserError("--gold", gold.file, problem, "Say which: --type tokens, or --type multilabel.")
    texts, others = ([label_text(value) for value in file.values] for file in (gold, sample))
    if parts or not all(map(NUMBER.fullmatch, texts)):
        are_tags = all(map(_TAGS.fullmatch, texts)) and any(" " in text for text in texts)  # of the words of each text
        return "tokens" if parts or are_tags else "classification"
    if all(map(_INTEGER.fullmatch, [*texts, *filter(NUMBER.fullmatch, others)])):
        return "classification"
    if {*texts} <= {"0", "1"}:
        problem = f"has fractions, and {gold.file} 0 and 1: they may be probabilities of class 1, or other numbers"
        remedy = "Write columns p_0 and p_1 for classes, or say that these are numbers: --type regression."
        raise UserError("--predictions", sample.file, problem, remedy)
    return "regression"


def _classification(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    (gold_names,) = _class_names([[*map(label_text, gold.values)]], order)
    if unlabeled := gold_names.count(""):
        raise UserError("--gold", gold.file, f"lacks {quantity(unlabeled, 'label')}", "Add them, or --type multilabel.")
    names = {*gold_names, *(name for file in files for name in file.names)}
    classes = [*order] or sorted(names, key=lambda name: (len(name), name) if name.isdigit() else (99, name))
    if metric in metrics.OF_SECOND_CLASS and (len(classes) != 2 or not (order or classes == ["0", "1"])):
        problem = f"is of the second of two classes, and there are {short_list(classes)}"
        raise UserError("--metric", metric, problem, IN_ORDER)
    if other := [*({*gold_names} - {*classes})]:
        raise UserError("--labels", ",".join(order), f"lacks {short_list(other)} of {gold.file}", "Name all classes.")
    number, predicted, remarks = {name: place for place, name in enumerate(classes)}, [], []
    for file in files:
        if file.scores is None and (rows := lists_of_numbers(file.values)):
            file = replace(file, values=[], scores=np.array(rows), names=[*map(str, range(len(rows[0])))])
        (texts,), remark = _class_names([[*map(label_text, file.values)]], order), ""
        if file.scores is not None and (metric in metrics.OF_PROBABILITIES or not texts):
            outputs, remark = _logits(metric, file, classes, bool(order))
        elif metric in metrics.OF_PROBABILITIES:
            raise UserError("--metric", metric, f"needs scores of the classes, and {file.file} has none", RENAME)
        else:
            remark = _strays(file, texts, number, gold)
            outputs = np.eye(len(classes) + bool(remark))[[number.get(text, len(classes)) for text in texts]]
        predicted.append(outputs)
        remarks.append(remark)
    width, labels = max(own.shape[1] for own in predicted), np.array([number[name] for name in gold_names])
    scored = []
    for own, remark in zip(predicted, remarks, strict=True):
        outputs = np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=own.min() - 1)
        counts = metrics.SUMMED["f1_macro"][0](outputs, labels).reshape(len(labels), 3, -1)
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
        remedy = "Write them as there, scores as p_<class>, or name the classes by their numbers: --labels no,yes"
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
    ties = 0 if metric in metrics.OF_PROBABILITIES else int((np.diff(np.sort(scores))[:, -1:] == 0).sum())
    tied = [f"{quantity(ties, 'row', ',')} with equal largest scores count as the first class of these"] if ties else []
    if is_valid.all():
        return logs, ", ".join([", probabilities", *remarks, *tied])
    if metric in metrics.OF_PROBABILITIES and scores.min() >= 0:
        problem = f"has scores of 0 and more that do not sum to 1, so {metric} has no probabilities"
        raise UserError("--predictions", file.file, problem, "Write probabilities or logits of all classes.")
    return scores, ", ".join([", logits", *tied])


def _regression(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    numbers = []
    for file in (gold, *files):
        texts = [label_text(value) for value in file.values]
        if not texts or (other := next((text for text in texts if not NUMBER.fullmatch(text)), None)) is not None:
            problem = f"has '{other}', which is no finite number" if texts else "has no column of numbers"
            raise UserError("--predictions", file.file, problem, "Repair it, or of labels: --type classification")
        numbers.append(np.array(texts, dtype=np.float64))
    return [Scored(Predictions("outputs", own[:, None], numbers[0]), own) for own in numbers[1:]]


def _tokens(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    """Score the entities of tags of words, or spans of characters."""

    def span(one: Any) -> tuple[Any, ...]:
        try:
            parts = [label_text(part) if isinstance(part, str | int | float) else "" for part in span_parts(one)]
        except (KeyError, TypeError, ValueError):
            return ()
        return tuple(parts) if all(parts) and "".join(parts[:2]).isdigit() else ()

    def row(value: Any) -> list[Any]:
        parts = value.split() if isinstance(value, str) else value if isinstance(value, list) else filter(None, [value])
        return [span(one) if isinstance(one, list | dict) else label_text(one) for one in parts]

    files, parts, gold_tags, gold_sizes = [gold, *files], list[list[set[Any]]](), list[str](), list[int]()
    for file in files:
        own = [*map(row, file.values)]
        has_spans, sizes = any(isinstance(one, tuple) for value in own for one in value), [*map(len, own)]
        own = own if has_spans else _class_names(own, order)
        tags = [tag for value in own for tag in value]
        if file is gold:
            gold_has_spans, gold_tags, gold_sizes = has_spans, [] if has_spans else tags, sizes
        problem, remedy = "", "Predict tags of all words, or spans as in the data."
        if has_spans != gold_has_spans and any(sizes):
            problem = f"has {'spans' if has_spans else 'tags'}, unlike {gold.file}: distill-run predict --out x.conll"
        elif not gold_has_spans and sizes != gold_sizes:
            place = next(place for place, size in enumerate(sizes) if size != gold_sizes[place])
            problem = f"has {sizes[place]} tags in row {place}, and {gold.file} has {gold_sizes[place]}"
        elif has_spans and not all(isinstance(one, tuple) and one for one in tags):
            problem = "has spans that lack a start, an end or a label"
        elif not has_spans and (number := next(filter(_INTEGER.fullmatch, tags), None)):  # -100 in PyTorch
            problem, remedy = f"has the number {number}, which is no tag", TAGS_OF_NUMBERS
        sets = [set[Any](value) for value in own]
        if not problem and not gold_has_spans:
            try:
                sets = _entities(TagSet.from_names(complete_names([*gold_tags, *tags]) or ["O"]), own)
            except UserError as error:
                problem, remedy = error.problem, error.remedy
        if problem:
            raise UserError("--gold" if file is gold else "--predictions", file.file, problem, remedy)
        parts.append(sets)
    return _of_sets(metric, parts)


def _entities(tagset: TagSet, rows: Sequence[Sequence[str]]) -> list[set[Any]]:
    """Return the entities of each row of tags: first and last word, counted over all rows, and type."""
    bounds, sets = np.cumsum([0, *map(len, rows)]), [set[Any]() for _ in rows]
    numbers = np.array([tagset.number[tag] for row in rows for tag in row], dtype=np.int64)
    for first, last, kind in tagset.entities(numbers, bounds).tolist():
        sets[int(np.searchsorted(bounds, first, side="right")) - 1].add((first, last, tagset.type_names[kind]))
    return sets


def _multilabel(metric: str, gold: Values, files: Sequence[Values], order: Sequence[str]) -> list[Scored]:
    parts, classes, remarks = list[list[set[Any]]](), {*order}, list[str]()
    for file in (gold, *files):
        values, remark = file.values, ""
        if not values and file.scores is not None:
            limit, names = (0 if (file.scores < 0).any() else 0.5), np.array(file.names, dtype=object)
            if limit and file.scores.max() > 1:
                problem = "has scores above 1 and none below 0, which are neither probabilities of labels nor logits"
                raise UserError("--predictions", file.file, problem, "Write one of these, or lists of labels.")
            values, remark = [names[row].tolist() for row in file.scores > limit], f", labels above {limit}"
        by_mark = {mark: _class_names(_label_lists(values, mark), order) for mark in SEPARATORS}
        # Gold labels may be one text; those of the others are divided as gives most of the gold labels.
        fits = {mark: sum(one in classes for row in rows for one in row) for mark, rows in by_mark.items()}
        used = [mark for mark in SEPARATORS if any(isinstance(v, str) and mark in v for v in values)]
        mark = max(fits, key=lambda mark: fits[mark]) if parts else next(iter(used), SEPARATORS[0])
        labels = [one for row in by_mark[mark] for one in row]
        classes |= set() if parts else {*labels}
        remark += f", divided by '{mark}'" if mark in used else ""
        remarks.append(remark + _strays(file, labels, classes, gold))
        parts.append([{(one,) for one in row} for row in by_mark[mark]])
    return [replace(one, remark=remark) for one, remark in zip(_of_sets(metric, parts), remarks[1:], strict=True)]


def _label_lists(values: Sequence[Any], mark: str) -> list[list[str]]:
    """Return the labels of each example: of a list, as text too, of a flag for each label, or of a text with marks."""

    def items_of(value: Any) -> list[Any]:
        if not isinstance(value, str):
            return [*value] if isinstance(value, list | tuple) else [value]
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

    def answers_in(value: Any) -> list[str]:
        if isinstance(value, dict):
            return answers_in(value.get("text", value.get("answer")))
        return [one for part in value for one in answers_in(part)] if isinstance(value, list) else [str(value or "")]

    texts = [*map(answers_in, gold.values)]
    clusters = np.unique(gold.columns.get("context") or np.arange(len(texts)), return_inverse=True)[1]
    scored = []
    for file in files:
        own = [{*answers_in(value)} or {""} for value in file.values]
        if len(most := max(own, key=len, default={""})) > 1:
            problem = f"has {len(most)} answers to one question, such as {short_list(sorted(most))}"
            raise UserError("--predictions", file.file, problem, "Write the predicted one: is it a gold file?")
        answers = [answer for (answer,) in own]
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
    "classification": ([*metrics.CLASSIFICATION_METRICS], _classification),
    "regression": ([*metrics.REGRESSION_METRICS], _regression),
    "multilabel": (("f1_micro", "f1_macro", "subset_accuracy"), _multilabel),
    "tokens": (("f1", "precision", "recall", "f1_macro"), _tokens),
    "questions": (("f1", "exact_match"), _questions),
    "retrieval": (("ndcg_at_10", "mrr_at_10", "recall_at_100", "ndcg", "map", "mrr"), _retrieval),
}
"""Task types: metrics, of which the first is the default, and what files hold."""
