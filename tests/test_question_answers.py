"""Answers from logits against run_qa's loops; exact match and F1 against the official scripts' arithmetic."""

import re
import string
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distill_runner.tasks.questions import QuestionsTask
from distill_runner.tasks.questions import answers as question_answers
from distill_runner.tasks.questions.windows import Windows
from helpers import run_qa
from helpers.made_questions import Row, made_rows, real_rows, windows_of


def made_logits(windows: Windows, seed: int) -> np.ndarray:
    """Random start and end logits, (T, 2), which favour the answers in every other window."""
    logits = np.random.default_rng(seed).normal(size=(len(windows.ids), 2)).astype(np.float32) * 2
    bounds, labels = np.asarray(windows.offsets), np.asarray(windows.labels)
    for number in range(0, len(windows), 2):
        logits[bounds[number] + labels[number], np.arange(2)] += 5
    return logits


def same_answers(windows: Windows, rows: list[Row], features: list[Row], seed: int, unanswerable: bool) -> None:
    """Both find the same from the same logits."""
    logits = made_logits(windows, seed)
    expected = run_qa.predictions(rows, features, np.split(logits, windows.offsets[1:-1]), unanswerable)
    spans = question_answers.best_spans(logits, windows, unanswerable)
    texts = question_answers.answer_texts(spans, windows, 0.0 if unanswerable else None)
    assert texts == [one["text"] for one in expected]
    for question, one in enumerate(expected):
        count = len(one["n_best"])
        found = [(spans["begin"][question, n], spans["end"][question, n]) for n in range(count)]
        assert found == [span[1:] for span in one["n_best"]]
        assert (spans["begin"][question, count:] == -1).all()
        probabilities = spans["probability"][question, :count].tolist()
        probabilities += [spans["null_probability"][question]] if unanswerable else []
        np.testing.assert_allclose(probabilities, one["probabilities"], rtol=1e-4, atol=1e-7)
        if one["margin"] is not None:
            np.testing.assert_allclose(
                question_answers.null_margin(spans)[question], one["margin"], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("unanswerable", [False, True])
def test_answers_are_those_of_run_qa(wordpiece: Any, tmp_path: Path, unanswerable: bool) -> None:
    rows = made_rows(60)
    windows = windows_of(tmp_path, rows, wordpiece, 96, tokens=24)
    features = run_qa.features(wordpiece, rows, 96, 24)
    for seed in range(3):
        same_answers(windows, rows, features, seed, unanswerable)


@pytest.mark.real
@pytest.mark.parametrize("unanswerable", [False, True])
def test_answers_to_real_questions_are_those_of_run_qa(
    data_dir: Path, minilm_folder: Path, tmp_path: Path, unanswerable: bool
) -> None:
    rows, tokenizer = real_rows(data_dir, 500), AutoTokenizer.from_pretrained(minilm_folder)
    windows = windows_of(tmp_path, rows, tokenizer, 384)
    same_answers(windows, rows, run_qa.features(tokenizer, rows, 384, 128), 0, unanswerable)


def test_a_short_window_without_a_span_has_no_answer(wordpiece: Any, tmp_path: Path) -> None:
    """Only [CLS] and the question have high logits: the answer is empty, and nothing is divided by zero."""
    windows = windows_of(tmp_path, made_rows(4), wordpiece, 96, tokens=24)
    logits = np.where(np.asarray(windows.begins) < 0, 9.0, 0.0)[:, None].repeat(2, 1)
    spans = question_answers.best_spans(logits, windows, n_best=1)
    assert question_answers.answer_texts(spans, windows) == [""] * 4
    assert np.isfinite(spans["probability"]).all()


def test_right_and_wrong_of_answers(wordpiece: Any, tmp_path: Path) -> None:
    """The probability of the truth is that of all spans that match a gold answer; no answer is one where it may be."""
    rows = made_rows(20)
    windows = windows_of(tmp_path, rows, wordpiece, 96, tokens=24)
    spans = question_answers.best_spans(made_logits(windows, 1), windows, unanswerable=True)
    golds = [row["answers"]["text"] for row in rows]
    fields = {"name": "toy", "dataset": "d", "columns": ["question", "context"], "epochs": 1, "metrics": ["f1"]}
    task = QuestionsTask(**fields, validation={"validation": "validation"}, unanswerable=True)
    found = task.example_predictions(made_logits(windows, 1), windows)
    assert 0 < found.correct.sum() < 20
    for number, row in enumerate(rows):
        words = {" ".join(official_words(gold, None)) for gold in golds[number]}
        texts = [row["context"][b:e] for b, e in zip(spans["begin"][number], spans["end"][number], strict=True)]
        matching = [p for p, text in zip(spans["probability"][number], texts, strict=True)
                    if p and " ".join(official_words(text, None)) in words]  # fmt: skip
        expected = sum(matching) if words else spans["null_probability"][number]
        assert found.label_probability[number] == pytest.approx(expected, abs=1e-6)
        answer, _, probability = found.prediction_text(number).rpartition(" ")
        assert (answer == "no answer") == (spans["null"][number] > spans["score"][number, 0])
        assert 0 <= float(probability.strip("()")) <= 1
        assert found.label_text(number) == (" / ".join(dict.fromkeys(golds[number])) or "no answer")


def test_with_a_step_an_answer_begins_where_its_token_has_most_context(wordpiece: Any, tmp_path: Path) -> None:
    windows = windows_of(tmp_path, made_rows(40), wordpiece, 96, stride="step", tokens=24)
    logits = np.random.default_rng(0).normal(size=(len(windows.ids), 2))
    spans = question_answers.best_spans(logits, windows)
    for question in range(windows.num_examples):
        first, last = windows.window_offsets[question : question + 2]
        tokens = slice(windows.offsets[first], windows.offsets[last])
        allowed = set(np.asarray(windows.begins[tokens])[np.asarray(windows.may_start[tokens])].tolist())
        found = [begin for begin in spans["begin"][question].tolist() if begin >= 0]
        assert found
        assert set(found) <= allowed
        assert len(set(zip(found, spans["end"][question].tolist(), strict=False))) == len(found)  # no span twice


# The official scripts' arithmetic, written again with loops.
PUNCTUATION = {chr(i) for i in range(sys.maxunicode) if unicodedata.category(chr(i)).startswith("P")}
ENGLISH = "a an the"
BY_LANGUAGE = {
    "en": ENGLISH,
    "es": "un una unos unas el la los las",
    "vi": "của là cái chiếc những",
    "de": "ein eine einen einem eines einer der die das den dem des",
}


def official_words(text: str, language: str | None) -> list[str]:
    left_out = set(string.punctuation) | (PUNCTUATION if language else set())
    text = "".join(character for character in text.lower() if character not in left_out)
    if language == "ar":
        text = text.replace("ال", " ")
    elif language not in ("hi", "zh"):
        words = BY_LANGUAGE[language or "en"].replace(" ", "|")
        text = re.sub(rf"\b({words})\b", " ", text)
    if language == "zh":
        pieces, run = [], ""
        for character in text:
            if "\u4e00" <= character <= "\u9fa5":
                pieces += [*run.split(), character]
                run = ""
            else:
                run += character
        return pieces + run.split()
    return text.split()


def official(answer: str, golds: list[str], language: str | None, version_2: bool) -> tuple[float, float]:
    if version_2:
        golds = [gold for gold in golds if official_words(gold, language)] or [""]
    exact, f1 = [], []
    words = official_words(answer, language)
    for gold in golds:
        gold_words = official_words(gold, language)
        exact.append(float(" ".join(words) == " ".join(gold_words)))
        common = sum((Counter(words) & Counter(gold_words)).values())
        if version_2 and (not words or not gold_words):
            f1.append(float(words == gold_words))
        elif common == 0:
            f1.append(0.0)
        else:
            precision, recall = common / len(words), common / len(gold_words)
            f1.append(2 * precision * recall / (precision + recall))
    return max(exact), max(f1)


CASES: list[tuple[str, list[str], str | None, float, float]] = [
    # answer, golds, language, exact match and F1 by hand (of 1.1)
    ("The Denver Broncos!", ["denver broncos"], None, 1, 1),
    ("Broncos", ["Denver Broncos"], None, 0, 2 / 3),
    ("the", ["a"], None, 1, 0),
    ("Denver, Colorado", ["Denver", "Colorado, Denver"], None, 0, 1),
    ("«Denver»", ["Denver"], None, 0, 0),
    ("«Denver»", ["Denver"], "en", 1, 1),
    ("النهر", ["نهر"], "ar", 1, 1),
    ("在2008年，", ["2008年"], "zh", 0, 0.8),
]


@pytest.mark.parametrize(("answer", "golds", "language", "exact", "f1"), CASES)
def test_scores_by_hand(answer: str, golds: list[str], language: str | None, exact: float, f1: float) -> None:
    (found_exact,), (found_f1,) = question_answers.question_scores([answer], [golds], language)
    assert (found_exact, found_f1) == pytest.approx((exact, f1))


LETTERS = st.text("aTheun elاdl河2.,—‘ \t漢", max_size=12)


@given(LETTERS, st.lists(LETTERS, min_size=1, max_size=3), st.sampled_from([None, *BY_LANGUAGE, "hi", "ar", "zh"]))
def test_scores_are_the_official_ones(answer: str, golds: list[str], language: str | None) -> None:
    for version_2 in (False, True):
        (exact,), (f1,) = question_answers.question_scores([answer], [golds], language, version_2)
        assert (exact, f1) == pytest.approx(official(answer, golds, language, version_2))
    assert question_answers.normalize_answer(answer, language) == " ".join(official_words(answer, language))


def official_best_score(scores: list[float], texts: list[str], has: list[bool], margins: list[float]) -> float:
    """``find_best_thresh``, without the threshold."""
    current = best = float(sum(not one for one in has))
    for number in sorted(range(len(scores)), key=lambda number: margins[number]):
        current += scores[number] if has[number] else (-1 if texts[number] else 0)
        best = max(best, current)
    return best / len(scores)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans(), st.floats(-5, 5)), min_size=1, max_size=30))
def test_the_best_threshold_is_the_official_one(rows: list[tuple[float, bool, bool, float]]) -> None:
    scores, answered, has, margins = map(list, zip(*rows, strict=True))
    expected = official_best_score(scores, ["x" if one else "" for one in answered], has, margins)
    found = question_answers.best_over_thresholds(
        np.array(scores), np.array(answered), np.array(has), np.array(margins)
    )
    assert found == pytest.approx(expected)
