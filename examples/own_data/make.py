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
SUPPORT = {
    "payment": (
        50,
        ["my card was charged twice", "the invoice is wrong", "I want my money back", "a fee I do not know"],
    ),
    "delivery": (
        25,
        ["the parcel has not come", "it went to the wrong door", "the box was broken", "it is two weeks late"],
    ),
    "account": (12, ["I cannot log in", "please change my address", "the code never arrives", "delete my data"]),
    "quality": (7, ["the zip broke at once", "the color is not as shown", "a part is missing", "it smells of glue"]),
    "return": (
        4,
        ["how do I send it back", "I need a label for the return", "it does not fit", "an exchange for a larger one"],
    ),
    "praise": (2, ["thank you for the quick help", "great service", "I am very happy with it", "you were so kind"]),
}
"""Classes of tickets to a shop, with the weight of each and what such tickets say."""
OPENINGS = [
    "hello,",
    "since yesterday",
    "order {}:",
    "I wrote before, but",
    "my wife says",
    "as I told your colleague,",
]
ENDINGS = [
    "please help",
    "what now?",
    "this is the {}th time",
    "I wait for your answer",
    "best wishes",
    "and I am not happy",
]
draw = random.Random(0)


def write_rows(file: str, rows: list[dict[str, object]]) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    with path.open("w", encoding="utf-8", newline="") as target:
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


def support(number: int) -> list[dict[str, object]]:
    """Tickets of six classes, the largest 25 times the smallest; some mention another class, some are mislabeled."""
    rows: list[dict[str, object]] = []
    names, weights = list(SUPPORT), [weight for weight, _ in SUPPORT.values()]
    for _ in range(number):
        label, other = draw.choices(names, weights, k=2)
        parts = [draw.choice(OPENINGS), draw.choice(SUPPORT[label][1])]
        parts += ["though not because", draw.choice(SUPPORT[other][1])] if draw.random() < 0.4 else []
        text = " ".join([*parts, draw.choice(ENDINGS)]).replace("{}", str(draw.randint(2, 99)))
        rows.append({"text": text, "label": other if draw.random() < 0.03 else label})
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
        Path("bridges", f"{split}.json").write_text(json.dumps(squad(size)), encoding="utf-8")
    pictures("pictures/train", 120)
    pictures("pictures/test", 40)
    for split, size in (("train", 400), ("validation", 100)):
        write_rows(f"answered/{split}.csv", answered(size, labeled=split != "train"))
    write_rows("answered/test.csv", reviews("en", 100))
    for split, size in (("train", 1500), ("validation", 1000), ("test", 1000)):
        write_rows(f"support/{split}.csv", support(size))
