"""Rows of SQuAD's shape, their faults, and the windows made of them, held against run_qa's features."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.readers.content import read_rows
from distill_runner.datasets.tokenization import cut_windows
from distill_runner.tasks.questions.data import Question, QuestionExamples, Windowing, read_questions
from distill_runner.tasks.questions.windows import OUTSIDE, Windows, write_windows
from helpers import run_qa
from helpers.made_questions import Row, made_rows, real_rows, windows_of
from helpers.words import WORDS


def same_as_run_qa(windows: Windows, features: list[Row]) -> None:
    bounds = np.asarray(windows.offsets)
    assert windows.labels is not None
    assert len(windows) == len(features)
    question_of = np.repeat(np.arange(windows.num_examples), np.diff(windows.window_offsets))
    assert question_of.tolist() == [feature["question"] for feature in features]
    for number, feature in enumerate(features):
        tokens = slice(bounds[number], bounds[number + 1])
        assert windows.ids[tokens].tolist() == feature["ids"]
        spans = [(OUTSIDE, OUTSIDE) if span is None else span for span in feature["offsets"]]
        assert list(zip(windows.begins[tokens].tolist(), windows.ends[tokens].tolist(), strict=True)) == spans
        assert tuple(windows.labels[number].tolist()) == feature["positions"]


@pytest.mark.parametrize("kind", ["wordpiece", "byte_level"])
def test_windows_are_those_of_run_qa(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer, rows = request.getfixturevalue(kind), made_rows(60)
    windows = windows_of(tmp_path, rows, tokenizer, 96, tokens=24)
    features = run_qa.features(tokenizer, rows, 96, 24)
    assert len(features) > len(rows)
    same_as_run_qa(windows, features)
    assert windows.segments is not None
    assert windows.segments.tolist() == [segment for feature in features for segment in feature["segments"]]
    assert any(windows.segments) == (kind == "wordpiece")


@pytest.mark.real
@pytest.mark.parametrize("max_length", [384, 128])
def test_windows_of_real_questions_are_those_of_run_qa(
    data_dir: Path, minilm_folder: Path, tmp_path: Path, max_length: int
) -> None:
    rows, tokenizer = real_rows(data_dir, 500), AutoTokenizer.from_pretrained(minilm_folder)
    stride = 128 if max_length == 384 else 32
    windows = windows_of(tmp_path, rows, tokenizer, max_length, tokens=stride)
    same_as_run_qa(windows, run_qa.features(tokenizer, rows, max_length, stride))


def test_a_step_moves_the_window_and_gives_each_token_the_window_with_most_context(
    wordpiece: Any, tmp_path: Path
) -> None:
    rows = made_rows(40)
    windows = windows_of(tmp_path, rows, wordpiece, 96, stride="step", tokens=24, max_question=10)
    assert len(windows) > len(rows)
    for number, row in enumerate(rows):
        ids = wordpiece(row["context"], add_special_tokens=False)["input_ids"]
        asked = wordpiece(row["question"], add_special_tokens=False)["input_ids"][:10]
        room = 96 - 3 - len(asked)
        spans, start = [], 0  # run_squad's loop
        while True:
            length = min(room, len(ids) - start)
            spans.append((start, length))
            if start + length == len(ids):
                break
            start += min(length, max(24, room // 4))
        first, last = windows.window_offsets[number : number + 2]
        assert last - first == len(spans)
        for place, (start, length) in enumerate(spans):
            tokens = slice(windows.offsets[first + place], windows.offsets[first + place + 1])
            outside = len(asked) + 2
            assert windows.ids[tokens].tolist()[outside:-1] == ids[start : start + length]
            allowed = [_has_most_context(spans, place, start + token) for token in range(length)]
            assert windows.may_start[tokens].tolist() == [False] * outside + allowed + [False]


def _has_most_context(spans: list[tuple[int, int]], place: int, token: int) -> bool:
    """run_squad's ``_check_is_max_context``."""
    scores = [
        min(token - start, start + length - 1 - token) + 0.01 * length if start <= token < start + length else -1
        for start, length in spans
    ]
    return scores.index(max(scores)) == place


@given(st.integers(1, 500), st.integers(4, 100), st.integers(1, 100))
def test_windows_cover_the_context(size: int, room: int, tokens: int) -> None:
    owned = np.zeros(size, dtype=int)
    windows = [*cut_windows(size, room, tokens)]
    for number, (first, last, is_owned) in enumerate(windows):
        assert last == min(first + room, size)
        assert first - windows[max(number - 1, 0)][0] <= room
        assert (last == size) == (number == len(windows) - 1)
        owned[first:last] += is_owned
    assert (owned == 1).all()


def test_long_questions_are_cut_and_counted(wordpiece: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row | {"question": "the river?"} for row in made_rows(20)]
    rows[3]["question"] = " ".join(WORDS * 30)
    with caplog.at_level(logging.WARNING):
        windows = windows_of(tmp_path, rows, wordpiece, 64, tokens=128)  # and the stride is more than what is left
    assert "1 of 20 questions are longer than 30 tokens, and are truncated" in caplog.text
    assert windows.lengths.max() == 64


def test_a_batch_reads_all_tokens_and_knows_its_outputs(wordpiece: Any, tmp_path: Path) -> None:
    windows = windows_of(tmp_path, made_rows(20), wordpiece, 48, tokens=8)
    batch = windows.batch(np.array([5, 0, 7]))
    assert batch.head_tokens is not None
    assert windows.labels is not None
    assert batch.head_tokens.tolist() == list(range(len(batch.input_ids)))
    assert batch.gold.tolist() == windows.labels[batch.index.numpy()].tolist()
    assert batch.gold.dtype == torch.int64
    assert windows.ids[batch.output_index].tolist() == batch.input_ids.tolist()


def test_questions_are_read_back(wordpiece: Any, tmp_path: Path) -> None:
    rows = made_rows(20)
    rows[4]["title"] = "Żółw 漢字 🙂"
    rows[4]["context"] = "漢字 🙂 Żółw the river"
    rows[4]["answers"] = {"text": ["the river"], "answer_start": [rows[4]["context"].index("the river")]}
    windows = windows_of(tmp_path, rows, wordpiece, 48, tokens=8)
    assert [windows.question(number) for number in range(20)] == list(read_questions(rows, needs_answers=False))


def test_a_context_in_two_portions_is_one(wordpiece: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill_runner.tasks.questions.windows.CHARACTERS_AT_ONCE", 1)
    rows = made_rows(4)
    rows = [rows[0], {**rows[0], "id": "again"}, rows[3], {**rows[0], "id": "and again"}]
    assert windows_of(tmp_path, rows, wordpiece, 48, tokens=8).contexts.tolist() == [0, 0, 1, 0]


CONTEXT = "The river is green. The stone is heavy."


def row(**changes: Any) -> Row:
    answers = {"text": ["green"], "answer_start": [13]}
    return {"id": "q", "question": "What?", "context": CONTEXT, "answers": answers} | changes


@pytest.mark.parametrize(
    "answers",
    [
        {"text": ["green"], "answer_start": [13]},
        [{"text": "green", "answer_start": 13}],
        "green",
        ["green"],
        '{"text": ["green"], "answer_start": [13]}',
        "{'text': ['green'], 'answer_start': [13]}",
        "{'text': array(['green'], dtype=object), 'answer_start': array([13], dtype=int32)}",
        {"text": "green"},
    ],
)
def test_answers_come_in_several_shapes(answers: Any) -> None:
    assert list(read_questions([row(answers=answers)])) == [Question("q", "What?", CONTEXT, ("green",), (13,))]


def test_a_column_may_hold_the_offset() -> None:
    (year,) = read_questions([row(context="It began in 1984.", answers=1984)])
    assert (year.answers, year.starts) == (("1984",), (12,)), "a CSV file whose answers are all numbers"
    for start in (30, "30.0", "[30]"):  # pandas has fractions in a column with missing numbers
        (question,) = read_questions([row(answers="is", answer_start=start)])
        assert question.starts == (30,)


MOVED, FIRST = "an answer that is not at its offset", "no answer_start, and an answer that occurs several times"


@pytest.mark.parametrize(
    ("start", "found", "said"), [(20, 13, MOVED), (0, 4, MOVED), (38, 26, MOVED), (None, 0, FIRST)]
)
def test_an_answer_beside_its_offset_is_moved_and_counted(
    start: int, found: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = CONTEXT[found : found + 5] if found else next(one for one in CONTEXT if CONTEXT.count(one) > 1)
    with caplog.at_level(logging.WARNING):
        (question,) = read_questions([row(answers={"text": [text], "answer_start": [start]})])
    assert question.starts == (found or CONTEXT.index(text),)
    assert f"split 'train': 1 of 1 questions have {said}" in caplog.text


def test_an_answer_that_is_nowhere_is_not_counted_as_moved(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = row(answers={"text": ["blue"], "answer_start": [3]})
    (question,) = read_questions([nowhere], trains=False)
    assert question.starts == (-1,)
    assert caplog.text == ""


BAD = {
    "no question": ([row(question=None)], "row 0 of split 'train' has no text"),
    "empty context": ([row(), row(id="r", context="  ")], "row 1 of split 'train' has no text"),
    "no answer": ([row(answers={"text": [], "answer_start": []})], "every question of this task must have one"),
    "empty answer": ([row(answers="")], "every question of this task must have one"),
    "impossible with an answer": ([row(is_impossible=True)], "but is_impossible says that there is none"),
    "impossible in a file of Excel": ([row(is_impossible="TRUE")], "but is_impossible says that there is none"),
    "answer elsewhere": ([row(answers={"text": ["blue"], "answer_start": [3]})], "does not contain the answer 'blue'"),
    "duplicate": ([row(), row()], "has the id of an earlier row, 'q'"),
    "no text": ([row(answers={"answer_start": [3]})], "the answers cannot be read (KeyError: 'text')"),
    "two offsets": ([row(answers={"text": ["green"], "answer_start": [3, 4]})], "the answers cannot be read"),
    "long": ([row(context="a" * 10_000_001)], "has 10,000,001 characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused(name: str) -> None:
    rows, message = BAD[name]
    with pytest.raises(UserError) as error:
        list(read_questions(rows))
    assert message in str(error.value)
    assert str(error.value).count("\n") == 1


def test_unanswerable_and_unlabeled_questions_are_read_where_they_may_be() -> None:
    none = row(answers={"text": [], "answer_start": []})
    (question,) = read_questions([none], needs_answers=False)
    assert question.answers == ()
    for missing in (None, float("nan")):  # which must not become the answer "nan", as in "finance"
        (question,) = read_questions([row(answers=missing)], needs_answers=False)
        assert question.answers == ()


def test_squad_json_is_read_row_by_row(tmp_path: Path) -> None:
    asked = {"id": "q", "question": "What?", "answers": [{"text": "green", "answer_start": 13}]}
    impossible = {"id": "r", "question": "Who?", "answers": [], "is_impossible": True, "plausible_answers": [1]}
    paragraphs = [{"context": CONTEXT, "qas": [asked, impossible]}]
    file = tmp_path / "train.json"
    articles = [{"title": "Rivers", "paragraphs": paragraphs}]
    part = CorpusPart(dataset=str(file), columns=["question"])
    for content in (paragraphs, articles, {"version": "v2.0", "data": articles}):
        file.write_text(json.dumps(content))
        questions = list(read_questions(read_rows(part, "train"), needs_answers=False))
        assert [(q.id, q.answers) for q in questions] == [("q", ("green",)), ("r", ())]
    file.write_text(file.read_text().replace('"answers": []', '"answers": [{"text": "green"}]'))
    with pytest.raises(UserError, match="is_impossible says that there is none"):
        list(read_questions(read_rows(part, "train"), needs_answers=False))


def test_a_slow_tokenizer_is_refused(wordpiece: Any, tmp_path: Path) -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="does not give the characters of each token"):
        write_windows(tmp_path, QuestionExamples(lambda: iter([]), True), Slow(), 48, Windowing())
