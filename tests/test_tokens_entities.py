"""Entities and scores of tags against conlleval's rules and seqeval, and decoding against enumeration."""

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from seqeval import metrics

from distill_runner.report.resampling import SummedScores, mean_f1_of_counts
from distill_runner.tasks.tokens.tags import SPELLINGS, TAG_METRICS, Scheme, TagScores, TagSet, complete_names

TAGS = {
    "bio": ["O", "B-x", "I-x", "B-y", "I-y"],
    "iob1": ["I-x", "O", "B-x", "I-y", "B-y"],
    "bioes": ["O", *(f"{role}-{kind}" for kind in "xy" for role in "BIES")],
    "io": ["O", "I-x", "I-y"],
}
BILOU = {"L": "E", "U": "S", "M": "I"}


def conlleval(sentence: Sequence[str]) -> set[tuple[int, int, str]]:
    """Entities by the rules of conlleval's startOfChunk and endOfChunk (with E and S), word by word."""
    chunks, start = set(), None
    previous_role, previous_type = "O", ""
    for position, tag in enumerate([*sentence, "O"]):
        role, _, kind = tag.partition("-")
        ends = previous_role != "O" and (
            role in ("O", "B", "S") or previous_role in ("E", "S") or kind != previous_type
        )
        starts = role != "O" and (role in ("B", "S") or previous_role in ("O", "E", "S") or kind != previous_type)
        if ends and start is not None:
            chunks.add((start, position, previous_type))
            start = None
        if starts:
            start = position
        previous_role, previous_type = role, kind
    return chunks


def scored(names: Sequence[str], gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> TagScores:
    flat = [np.array([names.index(tag) for row in rows for tag in row], dtype=np.int64) for rows in (gold, predicted)]
    scheme: Scheme | None = "iob1" if names == TAGS["iob1"] else None
    return TagScores(flat[0], flat[1], np.cumsum([0, *map(len, gold)]), TagSet.from_names(names, scheme))


def drawn(names: Sequence[str], count: int, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    rng = random.Random(seed)
    gold = [[rng.choice(names) for _ in range(rng.choice([0, 1, 2, 5, 9]))] for _ in range(count)]
    return gold, [[rng.choice(names) if rng.random() < 0.3 else tag for tag in row] for row in gold]


@pytest.mark.parametrize("scheme", TAGS)
def test_counts_are_conllevals_on_ten_thousand_sentences(scheme: str) -> None:
    names = TAGS[scheme]
    gold, predicted = drawn(names, 10_000, 0)
    scores = scored(names, gold, predicted)
    expected = np.zeros((len(gold), 3), dtype=int)
    for number, (one, other) in enumerate(zip(gold, predicted, strict=True)):
        actual, found = conlleval(one), conlleval(other)
        expected[number] = len(actual & found), len(found), len(actual)
    assert (scores.counts.sum(axis=1) == expected).all()
    right, found_number, actual_number = expected.sum(axis=0)
    assert scores.metric("f1") == 2 * right / (found_number + actual_number)


@pytest.mark.parametrize("scheme", TAGS)
def test_scores_are_seqevals(scheme: str) -> None:
    """On tens of thousands of tag sequences, in portions that differ in what they lack."""
    names = TAGS[scheme]
    for seed in range(30):
        gold, predicted = drawn(names, 100 if seed else 3000, seed)
        scores = scored(names, gold, predicted)
        for name in ("f1", "precision", "recall"):
            assert scores.metric(name) == pytest.approx(getattr(metrics, f"{name}_score")(gold, predicted), abs=1e-12)
        macro = metrics.f1_score(gold, predicted, average="macro")
        assert scores.metric("f1_macro") == pytest.approx(macro, abs=1e-12)
        assert scores.metric("accuracy") == pytest.approx(metrics.accuracy_score(gold, predicted), abs=1e-12)


@pytest.mark.parametrize("metric", TAG_METRICS)
def test_counts_of_sentences_give_the_metric(metric: str) -> None:
    """So that paired tests, which resample sentences, compute it anew."""
    scores = scored(TAGS["bio"], *drawn(TAGS["bio"], 200, 1))
    counts = scores.summed_counts(metric)
    assert mean_f1_of_counts(counts.sum(axis=0)) == pytest.approx(scores.metric(metric), abs=1e-12)
    paired = SummedScores([counts], [counts], mean_f1_of_counts, np.arange(200))
    assert paired.units == 200
    chosen = np.random.default_rng(0).integers(0, 200, 200)
    again = np.bincount(chosen, minlength=200)
    assert paired.scores(again[None])[0, 0] == pytest.approx(mean_f1_of_counts(counts[chosen].sum(axis=0)))


@pytest.mark.parametrize("scheme", ["bio", "iob1", "bioes"])
def test_viterbi_is_the_best_allowed_sequence(scheme: str) -> None:
    names = TAGS[scheme]
    tagset, rng = TagSet.from_names(names, "iob1" if scheme == "iob1" else None), np.random.default_rng(0)
    lengths = [3, 0, 1, 4, 2, 3, *[1] * 9]
    bounds = np.cumsum([0, *lengths])
    scores = rng.normal(size=(bounds[-1], len(names)))
    best = tagset.viterbi(scores, bounds)
    assert not len(tagset.misfits(best, bounds))
    allowed = tagset.transitions
    for first, length in zip(bounds.tolist(), lengths, strict=False):
        values = []
        for path in product(range(len(names)), repeat=length):
            steps = [-1, *path, -1]
            if length and all(allowed[steps[i], steps[i + 1]] for i in range(length + 1)):
                values.append((sum(scores[first + i, tag] for i, tag in enumerate(path)), path))
        if length:
            assert tuple(best[first : first + length]) == max(values)[1]


@pytest.mark.parametrize(
    ("rows", "scheme"),
    [
        ([["B-x", "I-x", "O"], ["B-x", "B-x"]], "bio"),
        ([["I-x", "I-x", "O"], ["I-x", "B-x"]], "iob1"),
        ([["I-x", "O"], ["O"]], "iob1"),
        ([["B-x", "O"], ["O", "I-x"]], "bio"),
        ([["B-x", "E-x"], ["S-x"]], "bioes"),
        ([["B-x", "L-x"], ["U-x"]], "bioes"),
        ([["x", "x"], ["O"]], "plain"),
    ],
)
def test_schemes_are_recognized(rows: list[list[str]], scheme: str) -> None:
    names = complete_names(tag for row in rows for tag in row)
    flat = np.array([names.index(tag) for row in rows for tag in row])
    assert TagSet.from_names(names).recognize(flat, np.cumsum([0, *map(len, rows)])) == scheme


def test_a_type_has_all_tags_of_its_scheme() -> None:
    assert complete_names(["B-x", "O"]) == ["O", "B-x", "I-x"]
    assert complete_names(["U-x", "B-y", "O"]) == ["O", "B-x", "I-x", "L-x", "U-x", "B-y", "I-y", "L-y", "U-y"]
    assert complete_names(["NN", "VB"]) == ["NN", "VB"]


@pytest.mark.parametrize("letters", ["BI", "BIES", "BMES", "BILU"])
@pytest.mark.parametrize("form", SPELLINGS)
def test_tags_mean_the_same_in_every_spelling(form: str, letters: str) -> None:
    standard = ["O", *(f"{letter}-{kind}" for kind in ("x-a", "y_b/c") for letter in letters)]
    names = ["O", *(form.format(*tag.split("-", 1)) for tag in standard[1:])]
    assert complete_names(names) == names
    expected, tagset = TagSet.from_names(standard), TagSet.from_names(names)
    assert (tagset.scheme, tagset.type_names) == (expected.scheme, expected.type_names)
    assert (tagset.roles == expected.roles).all()
    gold, predicted = drawn(names, 300, 1)
    own = dict(zip(names, ["O", *(f"{BILOU.get(tag[0], tag[0])}{tag[1:]}" for tag in standard[1:])], strict=True))
    rows = [[[own[tag] for tag in row] for row in side] for side in (gold, predicted)]
    assert scored(names, gold, predicted).metric("f1") == pytest.approx(metrics.f1_score(*rows), abs=1e-12)


@pytest.mark.parametrize("names", [["O", "first_name", "last_name"], ["NN", "VB", "X_S", "X_U"], ["A/B", "NN/S", "O"]])
def test_plain_tags_stay_plain(names: list[str]) -> None:
    assert TagSet.from_names(names).scheme == "plain"
