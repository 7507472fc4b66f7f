"""Texts and images that say nothing of their labels: whatever the layout, what a run reads predicts no label.

A reader that mistakes the label in another form for an input would give a model a score that no text explains. For
every layout that is accepted, a classifier of single features (naive Bayes) learns from what ``examples`` returns.
"""

import csv
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from distill_runner.tasks import make_task
from helpers.words import WORDS

SIZES = {"train": 240, "validation": 120}
NAMES = ("bad", "good")
DEVIATIONS = 5.0
"""Standard deviations from one half that the area under the ROC curve may have by chance."""
Unit = tuple[list[str], Any]
"""The features of one decision of a model, and its label."""
Columns = dict[str, list[Any]]


class Noise:
    """Columns of random values for one split."""

    def __init__(self, split: str) -> None:
        self.rng, self.size = random.Random(split), SIZES[split]
        self.labels = [self.rng.randrange(2) for _ in range(self.size)]

    def texts(self) -> list[str]:
        return [" ".join(self.rng.choices(WORDS, k=self.rng.randint(4, 9))) for _ in range(self.size)]

    def names(self, form: str = "{}") -> list[str]:
        return [form.format(NAMES[label]) for label in self.labels]

    def plain(self) -> Columns:
        return {"text": self.texts(), "label": self.names()}


def write_csv(file: Path, columns: Columns, separator: str = ",") -> None:
    with (gzip.open if file.suffix == ".gz" else open)(file, "wt", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=separator).writerows([columns, *zip(*columns.values(), strict=True)])


def write_lines(file: Path, columns: Columns) -> None:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(pyarrow.compress(text.encode(), "zstd", asbytes=True) if file.suffix == ".zst" else text.encode())


def write_json(file: Path, columns: Columns) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file.write_text(json.dumps(rows))


def write_parquet(file: Path, columns: Columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


WRITERS: dict[str, Callable[[Path, Columns], None]] = {
    "csv": write_csv,
    "tsv": lambda file, columns: write_csv(file, columns, "\t"),
    "csv.gz": write_csv,
    "jsonl": write_lines,
    "jsonl.zst": write_lines,
    "json": write_json,
    "parquet": write_parquet,
}


def tables(make: Callable[[Noise], Columns], suffix: str = "csv", **fields: Any) -> Callable[[Path], dict[str, Any]]:
    """A folder with a file for each split."""

    def write(folder: Path) -> dict[str, Any]:
        for split in SIZES:
            WRITERS[suffix](folder / f"{split}.{suffix}", make(Noise(split)))
        return {"dataset": str(folder), **fields}

    return write


def setfit(noise: Noise) -> Columns:
    return {"text": noise.texts(), "label": noise.labels, "label_text": noise.names()}


def inference(noise: Noise) -> Columns:
    annotators = [[name, name, "-"] for name in noise.names()]
    return {
        "gold_label": noise.names(),
        "annotator_labels": annotators,
        "pairID": [f"{number}{name[0]}" for number, name in enumerate(noise.names())],
        "sentence1": noise.texts(),
        "sentence2": noise.texts(),
    }


def one_file(folder: Path) -> dict[str, Any]:
    write_csv(folder / "all.csv", Noise("train").plain())
    return {"dataset": str(folder / "all.csv"), "split_off": 1 / 3}


def saved_to_disk(folder: Path) -> dict[str, Any]:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(NAMES))})
    parts = {split: {**Noise(split).plain(), "label": Noise(split).labels} for split in SIZES}
    content = {split: datasets.Dataset.from_dict(columns, features) for split, columns in parts.items()}
    datasets.DatasetDict(content).save_to_disk(folder / "saved")
    return {"dataset": str(folder / "saved")}


def images(folder: Path) -> dict[str, Any]:
    for split in SIZES:
        noise, pixels = Noise(split), np.random.default_rng(len(split))
        for number, name in enumerate(noise.names()):
            file = folder / split / name / f"{number}_{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file)
    return {"dataset": str(folder), "type": "images", "columns": ["image"], "select_on": "validation"}


def words_and_tags(noise: Noise) -> Columns:
    words = [text.split() for text in noise.texts()]
    tags = [[noise.rng.choice(["O", "B-place"]) for _ in some] for some in words]
    return {"id": noise.names("{}-1"), "tokens": words, "pos_tags": tags, "ner_tags": tags}


def conll(folder: Path) -> dict[str, Any]:
    for split in SIZES:
        columns = words_and_tags(Noise(split))
        sentences = zip(columns["tokens"], columns["ner_tags"], strict=True)
        lines = ("".join(f"{word} {tag}\n" for word, tag in zip(*pair, strict=True)) for pair in sentences)
        (folder / f"{split}.conll").write_text("\n".join(lines))
    return {"dataset": str(folder), "type": "tokens"}


def questions(noise: Noise) -> Columns:
    contexts = [noise.rng.sample(WORDS, 8) for _ in range(noise.size)]
    firsts = [noise.rng.randrange(8) for _ in contexts]
    starts = [sum(len(word) + 1 for word in words[:first]) for words, first in zip(contexts, firsts, strict=True)]
    answers = [
        {"text": [words[first]], "answer_start": [start]}
        for words, first, start in zip(contexts, firsts, starts, strict=True)
    ]
    ids = [f"q{number}" for number in range(noise.size)]
    return {"id": ids, "question": noise.texts(), "context": [*map(" ".join, contexts)], "answers": answers}


LAYOUTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{f"text and label, {suffix}": tables(Noise.plain, suffix) for suffix in WRITERS},
    **{f"SetFit, {suffix}": tables(setfit, suffix) for suffix in ("csv", "jsonl", "parquet")},
    "SNLI": tables(inference, "jsonl", label="gold_label"),
    "one file": one_file,
    "save_to_disk": saved_to_disk,
    "pair": tables(lambda n: {"sentence1": n.texts(), "sentence2": n.texts(), "label": n.labels}),
    "scores": tables(lambda n: {"text": n.texts(), "label": [n.rng.random() for _ in n.labels]}, type="regression"),
    "names of labels": tables(
        lambda n: {"text": n.texts(), "labels": [[NAMES[i]] * (n.rng.random() < 0.7) for i in n.labels]},
        "jsonl",
        type="multilabel",
    ),
    "flags": tables(
        lambda n: {"text": n.texts(), "labels": [[i, 1 - i, n.rng.randrange(2)] for i in n.labels]},
        "parquet",
        type="multilabel",
    ),
    "labels in a text": tables(
        lambda n: {"text": n.texts(), "labels": [f"{NAMES[i]};{n.rng.choice('ab')}" for i in n.labels]},
        type="multilabel",
        separator="semicolon",
    ),
    "columns of labels": tables(
        lambda n: {"text": n.texts(), "bad": [1 - i for i in n.labels], "good": n.labels},
        type="multilabel",
        label=["bad", "good"],
        columns=["text"],
    ),
    "images": images,
    "words and tags": tables(words_and_tags, "jsonl", type="tokens", label="ner_tags"),
    "CoNLL": conll,
    "questions": tables(questions, "jsonl", type="questions", columns=["question", "context"], label="answers"),
    "pairs for vectors": tables(
        lambda n: {"sentence1": n.texts(), "sentence2": n.texts(), "label": [n.rng.random() for _ in n.labels]},
        type="embeddings",
        columns=["sentence1", "sentence2"],
    ),
}


# --- What a model reads


def units_of_texts(examples: Any) -> Iterator[Unit]:
    """Words of each column, for each label of an example; scores are above their median or not."""
    labels = np.asarray(examples.labels)
    if labels.ndim == 1 and not np.issubdtype(labels.dtype, np.integer):
        labels = (labels > np.median(labels)).astype(int)
    for row, texts in enumerate(zip(*examples.texts, strict=True)):
        features = [f"{column} {word}" for column, text in enumerate(texts) for word in {*text.split(), text[:3]}]
        for number, label in enumerate(np.atleast_1d(labels[row]).tolist()):
            prefix = f"{number} " if labels.ndim == 2 else ""
            yield [f"{prefix}{feature}" for feature in features], int(label)


def units_of_images(examples: Any) -> Iterator[Unit]:
    import io

    for value, label in zip(examples.values, examples.labels, strict=True):
        data = value["bytes"] if isinstance(value, dict) else Path(value).read_bytes()
        pixels = np.asarray(Image.open(io.BytesIO(data))).reshape(-1)
        yield [f"{number} {pixel // 64}" for number, pixel in enumerate(pixels.tolist())], int(label)


def units_of_words(examples: Any) -> Iterator[Unit]:
    for sentence in examples.items:
        words = sentence.word_texts()
        for number, tag in enumerate(sentence.tags):
            yield [f"{k} {words[number + k]}" for k in (-1, 0, 1) if 0 <= number + k < len(words)], int(tag != "O")


def units_of_questions(examples: Any) -> Iterator[Unit]:
    for question in examples:
        words, asked = question.context.split(), question.question.split()
        begins = np.cumsum([0, *(len(word) + 1 for word in words)])
        for number, word in enumerate(words):
            features = [f"word {word}", f"place {number}", f"asked {word in asked}", f"id {question.id[0]}"]
            yield features, int(begins[number] == question.starts[0])


UNITS = {"images": units_of_images, "tokens": units_of_words, "questions": units_of_questions}


@dataclass
class Learner:
    """Naive Bayes on features that are there or not, with add-one smoothing."""

    counts: tuple[Counter[str], Counter[str]]
    sizes: tuple[int, int]

    @classmethod
    def fit(cls, units: list[Unit]) -> "Learner":
        counts = tuple(Counter(f for features, label in units if label == c for f in features) for c in (0, 1))
        sizes = tuple(sum(label == c for _, label in units) for c in (0, 1))
        return cls(counts, sizes)  # type: ignore[arg-type]

    def odds(self, features: list[str]) -> float:
        """The logarithm of the odds of label 1, without the prior."""
        zero, one = (
            sum(np.log((counts[feature] + 1) / (size + 2)) for feature in features)
            for counts, size in zip(self.counts, self.sizes, strict=True)
        )
        return float(one - zero)


def deviations(train: list[Unit], validation: list[Unit]) -> float:
    """Distance of the area under the ROC curve from one half, in its standard deviations by chance."""
    from scipy.stats import rankdata

    learner, labels = Learner.fit(train), np.array([label for _, label in validation])
    ranks = rankdata([learner.odds(features) for features, _ in validation])
    positive, negative = int(labels.sum()), int((1 - labels).sum())
    area = (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * negative)
    return abs(area - 0.5) / float(np.sqrt((positive + negative + 1) / (12 * positive * negative)))


def units(folder: Path, layout: str) -> tuple[list[Unit], list[Unit]]:
    fields = {"name": "own", "metrics": None, "max_length": 32, "epochs": 1, "validation": {"validation": "validation"}}
    task = make_task(**fields | LAYOUTS[layout](folder)).resolved()
    of = UNITS.get(task.type, units_of_texts)
    train, validation = (list(of(task.examples(split))) for split in (task.train, *task.validation.values()))
    return train, validation


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_predicts_no_label(tmp_path: Path, layout: str) -> None:
    train, validation = units(tmp_path, layout)
    assert min(len(train), len(validation)) >= 60
    assert deviations(train, validation) < DEVIATIONS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_learner_would_see_a_label_among_the_inputs(tmp_path: Path, layout: str) -> None:
    """With the label as one more feature of three units in four."""
    parts = units(tmp_path, layout)
    leaky = [
        [([*features, f"leak {label if number % 4 else number % 3}"], label) for number, (features, label) in part]
        for part in map(list, map(enumerate, parts))
    ]
    assert deviations(*leaky) > DEVIATIONS
