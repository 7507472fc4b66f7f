"""Questions of SQuAD's shape, made of a few words."""

import random
from typing import Any

from words import WORDS

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
