"""Write small made-up files in the formats of docs/tutorials into the working folder: `python make.py`."""

import csv
import json
import random
from pathlib import Path

from PIL import Image

SENTENCES = {
    "food": ["the soup was cold", "a wonderful cake", "the fish was fresh"],
    "price": ["far too expensive", "a fair bill", "cheap for what it is"],
    "service": ["a friendly waiter", "we waited an hour", "nobody came to the table"],
}
REVIEWS = {
    "en": {"good": ["a lovely place", "we will come again"], "bad": ["never again", "a sad evening"]},
    "de": {"good": ["ein schöner Ort", "wir kommen wieder"], "bad": ["nie wieder", "ein trauriger Abend"]},
}
draw = random.Random(0)


def write_rows(file: str, rows: list[dict[str, object]]) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    with path.open("w", newline="") as target:
        table = csv.DictWriter(target, rows[0])
        table.writeheader()
        table.writerows(rows)


def tickets() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number in range(120):
        subjects = draw.sample(sorted(SENTENCES), draw.randint(0, 3))
        text = f"visit {number}: " + ", ".join(draw.choice(SENTENCES[subject]) for subject in subjects)
        rows.append({"text": text, "labels": subjects})
    return rows


def reviews(language: str, number: int) -> list[dict[str, object]]:
    labels = [draw.choice(["good", "bad"]) for _ in range(number)]
    return [
        {"text": f"{place}: {draw.choice(REVIEWS[language][label])}", "label": label}
        for place, label in enumerate(labels)
    ]


def scored() -> list[dict[str, object]]:
    """Reviews with the probabilities that another model gives their classes."""
    rows = reviews("en", 100)
    for row in rows:
        good = round(draw.uniform(0.7, 0.99) if row["label"] == "good" else draw.uniform(0.01, 0.3), 4)
        row |= {"p_bad": round(1 - good, 4), "p_good": good}
    return rows


def answered(number: int, labeled: bool) -> list[dict[str, object]]:
    """Reviews with the scores of a language model: wrong for one of ten, and missing for one of twenty."""
    rows = reviews("en", number)
    for row in rows:
        label = row["label"] if labeled else row.pop("label")
        good = draw.uniform(0.6, 0.99) if (label == "good") != (draw.random() < 0.1) else draw.uniform(0.01, 0.4)
        row |= {"p_bad": round(1 - good, 3), "p_good": round(good, 3)}
        if not labeled and draw.random() < 0.05:
            row |= {"p_bad": "", "p_good": ""}
    return rows


def squad(number: int) -> dict[str, object]:
    """SQuAD's nesting of paragraphs, questions and answers."""
    paragraphs = []
    for place in range(number):
        name, year = draw.choice(["Ada", "Ben", "Cleo"]), str(draw.randint(1900, 2020))
        context = f"Bridge {place} was built by {name} in {year}. It is made of stone."
        answers = {f"Who built bridge {place}?": name, f"When was bridge {place} built?": year}
        qas = []
        for nth, (question, text) in enumerate(answers.items()):
            answer = {"text": text, "answer_start": context.index(text)}
            qas.append({"id": f"{place}-{nth}", "question": question, "answers": [answer]})
        paragraphs.append({"context": context, "qas": qas})
    return {"version": "1.1", "data": [{"title": "Bridges", "paragraphs": paragraphs}]}


def pictures(folder: str, number: int) -> None:
    for place in range(number):
        name, color = draw.choice([("day", (200, 220, 255)), ("night", (10, 10, 40))])
        image = Image.new("RGB", (16, 16), tuple(shade + draw.randint(-10, 10) for shade in color))
        path = Path(folder, name, f"{place}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


if __name__ == "__main__":
    write_rows("tickets.jsonl", tickets())
    write_rows("scored.csv", scored())
    write_rows("reviews/en/train.csv", reviews("en", 100))
    for language in REVIEWS:
        write_rows(f"reviews/{language}/validation.csv", reviews(language, 30))
    for split, size in (("train", 40), ("validation", 15)):
        Path("bridges").mkdir(exist_ok=True)
        Path("bridges", f"{split}.json").write_text(json.dumps(squad(size)))
    pictures("pictures/train", 120)
    pictures("pictures/test", 40)
    for split, size in (("train", 400), ("validation", 100)):
        write_rows(f"answered/{split}.csv", answered(size, labeled=split != "train"))
    write_rows("answered/test.csv", reviews("en", 100))
