"""Scores of entities: counts by sentence and by type, precision, recall, F1, accuracy of words, and kinds of errors.

Counts are those of conlleval and of seqeval's default mode: an entity is right if its words and its type are right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distill_runner.common.terminal import Undefined
from distill_runner.datasets.evaluate_metrics import as_items
from distill_runner.tasks.tokens.schemes import TagSet

RIGHT, TYPE, BOUNDARY, MISSED, INVENTED = "right", "wrong type", "wrong boundary", "missed", "invented"
ERRORS = (MISSED, TYPE, BOUNDARY, INVENTED)


@dataclass(frozen=True)
class TagScores:
    """Tags of N words in S sentences, of the data and as predicted.

    Attributes:
        gold, predicted: (N,), indices of tags.
        sentences: (S + 1,), first word of each sentence, followed by N.
    """

    gold: np.ndarray
    predicted: np.ndarray
    sentences: np.ndarray
    tagset: TagSet

    @cached_property
    def first_words(self) -> np.ndarray:
        """Whether each word is the first one of its sentence, (N,)."""
        return first_words(self.sentences)

    @cached_property
    def gold_entities(self) -> np.ndarray:
        """Entities of the data as rows (first word, last word + 1, type), (E, 3)."""
        return self.tagset.entities(self.gold, self.first_words)

    @cached_property
    def predicted_entities(self) -> np.ndarray:
        """Predicted entities, as ``gold_entities``."""
        return self.tagset.entities(self.predicted, self.first_words)

    @cached_property
    def is_found(self) -> np.ndarray:
        """Whether each entity of the data is predicted, (E,)."""
        return np.isin(_keys(self.gold_entities), _keys(self.predicted_entities))

    @cached_property
    def counts(self) -> np.ndarray:
        """Numbers of right, predicted and actual entities of each sentence and type, int64 (S, T, 3)."""
        num_types = len(self.tagset.type_names)
        counts = np.zeros((len(self.sentences) - 1, num_types, 3), dtype=np.int64)
        sources = self.gold_entities[self.is_found], self.predicted_entities, self.gold_entities
        for column, entities in enumerate(sources):
            places = self.sentence_of(entities[:, 0]) * num_types + entities[:, 2]
            counts[:, :, column] = np.bincount(places, minlength=counts[:, :, 0].size).reshape(-1, num_types)
        return counts

    @cached_property
    def word_counts(self) -> np.ndarray:
        """Numbers of words with the right tag and of all words, twice, of each sentence, int64 (S, 3)."""
        sizes = np.diff(self.sentences)
        right = np.concatenate([[0], np.cumsum(self.gold == self.predicted)])
        return np.stack([np.diff(right[self.sentences]), sizes, sizes], axis=1)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the predicted tags (S, 1) and those of the data (S,) by sentence, for metrics of ``evaluate``."""
        names = np.array(self.tagset.names, dtype=object)
        predicted, gold = (
            as_items([part.tolist() for part in np.split(names[tags], self.sentences[1:-1])])
            for tags in (self.predicted, self.gold)
        )
        return predicted[:, None], gold

    def sentence_of(self, words: np.ndarray) -> np.ndarray:
        """Return the number of the sentence of each word."""
        numbers: np.ndarray = np.searchsorted(self.sentences, words, side="right") - 1
        return numbers

    def by_type(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and number of entities of each type that is predicted or in the data."""
        totals = self.counts.sum(axis=0)
        return {
            name: {"precision": _ratio(a, b), "recall": _ratio(a, c), "f1": _ratio(2 * a, b + c), "support": int(c)}
            for name, (a, b, c) in zip(self.tagset.type_names, totals.tolist(), strict=True)
            if b or c
        }

    @cached_property
    def errors(self) -> tuple[list[str], list[str]]:
        """What became of each entity of the data, (E,), and of each predicted one.

        An entity that is not right has a wrong boundary if a predicted entity of its type shares words with it, else a
        wrong type if any predicted one does, else it is missed. A predicted entity is invented if it shares no word
        with an entity of the data; its kind is otherwise that of the overlap.
        """
        return (
            _kinds(self.gold_entities, self.predicted_entities, len(self.gold), MISSED),
            _kinds(self.predicted_entities, self.gold_entities, len(self.gold), INVENTED),
        )

    def errors_by_type(self) -> dict[str, dict[str, int]]:
        """Return the number of errors of each kind by type: of the data's types, and of the predicted for invented."""
        gold, predicted = self.errors
        table = {name: dict.fromkeys((RIGHT, *ERRORS), 0) for name in self.tagset.type_names}
        for (_, _, kind), error in zip(self.gold_entities.tolist(), gold, strict=True):
            table[self.tagset.type_names[kind]][error] += 1
        for (_, _, kind), error in zip(self.predicted_entities.tolist(), predicted, strict=True):
            table[self.tagset.type_names[kind]][INVENTED] += error == INVENTED
        return {name: row for name, row in table.items() if any(row.values())}


def first_words(sentences: np.ndarray) -> np.ndarray:
    """Return whether each of N words is the first one of its sentence, from the first words (S + 1,) and N."""
    is_first = np.zeros(int(sentences[-1]), dtype=bool)
    is_first[sentences[:-1][np.diff(sentences) > 0]] = True
    return is_first


def _keys(entities: np.ndarray) -> np.ndarray:
    """Return one number for each entity, equal for equal ones."""
    keys: np.ndarray = (entities[:, 0] << 42) + (entities[:, 1] - entities[:, 0] << 20) + entities[:, 2]
    return keys


def _kinds(entities: np.ndarray, others: np.ndarray, size: int, without_overlap: str) -> list[str]:
    other_of_word = np.full(size + 1, -1, dtype=np.int64)
    for number, (begin, end, _) in enumerate(others.tolist()):
        other_of_word[begin:end] = number
    kinds = []
    for row in entities.tolist():
        overlaps = {int(number) for number in other_of_word[row[0] : row[1]]} - {-1}
        rows = [others[number].tolist() for number in overlaps]
        if row in rows:
            kinds.append(RIGHT)
        elif not rows:
            kinds.append(without_overlap)
        else:
            kinds.append(BOUNDARY if any(other[2] == row[2] for other in rows) else TYPE)
    return kinds


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _micro(scores: TagScores) -> tuple[int, int, int]:
    right, predicted, actual = scores.counts.sum(axis=(0, 1)).tolist()
    return right, predicted, actual


def _f1(scores: TagScores) -> float:
    right, predicted, actual = _micro(scores)
    if not predicted + actual:
        return Undefined(0.0, "no entity is predicted or present")
    return 2 * right / (predicted + actual)


def _precision(scores: TagScores) -> float:
    right, predicted, _ = _micro(scores)
    return right / predicted if predicted else Undefined(0.0, "no entity is predicted")


def _recall(scores: TagScores) -> float:
    right, _, actual = _micro(scores)
    return right / actual if actual else Undefined(0.0, "no entity is present")


def _f1_macro(scores: TagScores) -> float:
    values = [row["f1"] for row in scores.by_type().values()]
    return float(np.mean(values)) if values else Undefined(0.0, "no entity is predicted or present")


def _accuracy(scores: TagScores) -> float:
    return float((scores.gold == scores.predicted).mean()) if len(scores.gold) else 0.0


TAG_METRICS: Mapping[str, Callable[[TagScores], float]] = {
    "f1": _f1,
    "precision": _precision,
    "recall": _recall,
    "f1_macro": _f1_macro,
    "accuracy": _accuracy,
}
"""Metrics of tags. ``f1``, ``precision`` and ``recall`` are micro averages over entities; ``accuracy`` is of words."""


def summed_counts(scores: TagScores, metric: str) -> np.ndarray:
    """Return counts (S, 3 T) of sentences, whose sums give the metric: the mean over T of F1 of three sums.

    Precision and recall are the F1 of counts in which predicted and actual entities are one number.
    """
    if metric == "accuracy":
        return scores.word_counts
    by_sentence = scores.counts if metric == "f1_macro" else scores.counts.sum(axis=1, keepdims=True)
    columns = {"precision": [0, 1, 1], "recall": [0, 2, 2]}.get(metric, [0, 1, 2])
    by_sentence = by_sentence[:, :, columns]
    if metric == "f1_macro":
        by_sentence = by_sentence[:, by_sentence.sum(axis=(0, 2)) > 0]
    return by_sentence.reshape(len(by_sentence), -1)
