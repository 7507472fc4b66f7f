"""Questions of SQuAD's shape, made of a few words or drawn from the real ones, and their windows."""

import random
from pathlib import Path
from typing import Any

import pytest

from distill_runner.tasks.questions.data import QuestionExamples, Windowing, read_questions
from distill_runner.tasks.questions.windows import Windows, write_windows
from helpers.words import WORDS

Row = dict[str, Any]


def made_rows(number: int, seed: int = 0, longest: int = 120) -> list[Row]:
    """Questions of 2 to 6 words about contexts of 3 to ``longest`` words, two or three about each."""
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < number:
        words = rng.choices(WORDS, k=rng.randint(3, longest))
        context = "  ".join(words) if rng.random() < 0.2 else " ".join(words)
        for _ in range(rng.randint(2, 3)):
            first = rng.randrange(len(words))
            text = words[first] if rng.random() < 0.3 else " ".join(words[first : first + rng.randint(1, 5)])
            start = context.find(text)
            answers = {"text": [text], "answer_start": [start]} if start >= 0 else {"text": [], "answer_start": []}
            asked = " ".join(rng.choices(WORDS, k=rng.randint(2, 12))) + "?"
            rows.append({"id": f"q{len(rows)}", "question": asked, "context": context, "answers": answers})
    return rows[:number]


def as_json(rows: list[Row]) -> dict[str, Any]:
    """SQuAD's nesting, a paragraph for each row."""
    paragraphs = []
    for row in rows:
        answers = row["answers"]
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(answers["text"], answers["answer_start"], strict=True)
        ]
        asked = {"id": row["id"], "question": row["question"], "answers": answers}
        paragraphs.append({"context": row["context"], "qas": [asked]})
    return {"version": "1.1", "data": [{"title": "Rivers", "paragraphs": paragraphs}]}


def real_rows(data_dir: Path, number: int) -> list[Row]:
    import pyarrow.parquet as pq

    files = sorted((data_dir / "squad" / "plain_text").glob("validation*.parquet"))
    if not files:
        pytest.skip("there is no SQuAD")
    rows: list[Row] = pq.read_table(files[0]).to_pylist()
    return random.Random(0).sample(rows, number)


def windows_of(folder: Path, rows: list[Row], tokenizer: Any, max_length: int, **windowing: Any) -> Windows:
    folder.mkdir(exist_ok=True)
    questions = QuestionExamples(lambda: read_questions(rows, needs_answers=False), labeled=True)
    write_windows(folder, questions, tokenizer, max_length, Windowing(**windowing))
    return Windows(folder)
