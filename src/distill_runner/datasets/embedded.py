"""Embedded datasets, for trials without a download: real English text and handwritten digits.

The text is prose of Python's documentation (``python_docs``, with its license). It is used for pre-training, for two
classification tasks in the format of GLUE, for questions in the format of SQuAD and for labels of words. Whole topics,
not passages, are assigned to train, validation and test, so that no text is in two splits.

The digits are the 1,797 gray images of 8 x 8 pixels that scikit-learn ships: the test part of UCI's "Optical
Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998).
"""

import gzip
import hashlib
import io
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
NAMES = ("pairs", "sentences", "questions", "words", "text", "digits")
VERSION = 2  # raise it when sampling changes

_SENTENCES = Path(__file__).parent / "python_docs" / "sentences.json.gz"
_PASSAGE_WORDS = 16
_MAX_DISTANCE = 2  # of the passages of a "same" pair: long topics change their subject
_COPIES = {"train": 3, "validation": 2, "test": 2}  # examples per passage or sentence and label
_EXCHANGES = 50  # rounds; all partners are then of another topic, unless one topic is most of the text
_SHARE_REPLACED = 0.3  # share of a sentence's words that a corruption replaces
_DIGIT_ENDS = (0.70, 0.85)  # shares of the digits at which the splits train and validation end

PAIR_LABELS = ["different", "same"]
SENTENCE_LABELS = ["corrupted", "original"]
QUESTION_PATTERNS: dict[str, str] = {
    "Under which condition": r"\b[Ii]f ([^,.;:]+),",
    "When": r"\b[Ww]hen ([^,.;:]+)[,.]",
    "What is defined": r"^(?:The|A|An) ([^,.;:()]{3,60}?) (?:is|are) ",
    "Which exception": r"\b([A-Z]\w*Error)\b",
    "What is returned": r"\breturns? ([^,.;:()]+)[,.]",
    "Which version": r"\bversion ([0-9.]+[0-9])",
    "Which statement": r"\b[Tt]he (\w+) statement",
    "For what": r"\bused (?:to|for) ([^,.;:()]+)[,.]",
    "What must it be": r"\bmust be ([^,.;:()]+)[,.]",
}
"""Beginning of the question -> pattern whose first group is the answer."""
NAME_PATTERNS: dict[str, str] = {
    "exception": r"\b(?:[A-Z]\w*(?:Error|Exception|Warning)|StopIteration|KeyboardInterrupt)\b",
    "statement": r"\b(?:assert|break|class|continue|del|for|from|global|if|import|raise|return|try|while|with|yield)"
    r"(?: \w+)? (?:statement|clause|expression)s?\b",
    "type": r"\b(?:integer|float|string|list|tuple|dictionary|set|mapping|sequence|generator|iterator|coroutine)s?"
    r"(?: objects?)?\b",
    "version": r"\b(?:Python |version )?\d\.\d+(?:\.\d+)?\b",
}
"""Type of a name in ``words`` -> pattern of its text."""
WORD_LABELS = ["O", *(f"{role}-{name}" for name in NAME_PATTERNS for role in "BI")]
_TOKEN = re.compile(r"\w+(?:\.\d+)*|[^\w\s]")
_GAP = "this"
_QUESTION_WORDS = 16
_CONTEXTS = {"train": 3, "validation": 1, "test": 1}
"""Number of contexts for each question, by split; each context draws its neighboring sentences anew."""


def embedded_columns(name: str, split: SplitName) -> tuple[dict[str, list[Any]], list[str] | None]:
    """Return the columns of a split of an embedded dataset, and the names of its classes, if it has any.

    The columns are named as in the public datasets that they resemble: those of GLUE, SQuAD or an image dataset. The
    plain text has a column ``topic`` as well. The rows are the same in every process.

    Args:
        name: one of ``NAMES``.
    """
    rng = random.Random(f"{name}:{split}")
    rows: list[tuple[Any, ...]]
    columns: tuple[str, ...]
    class_names: list[str] | None = None
    match name:
        case "text":
            rows = [(text, topic) for topic, texts in embedded_passages(split).items() for text in texts]
            columns = ("text", "topic")
        case "pairs":
            rows, columns, class_names = _pairs(split, rng), ("sentence1", "sentence2", "label"), PAIR_LABELS
        case "sentences":
            rows, columns, class_names = _sentences(split, rng), ("sentence", "label"), SENTENCE_LABELS
        case "questions":
            rows = list(_questions(split, rng))
            columns = ("title", "context", "question", "answers")
        case "words":
            rows, columns, class_names = list(_words(split)), ("tokens", "ner_tags"), WORD_LABELS
        case _:
            images, digits = digit_images()[split]
            return {"image": list(map(_png, images)), "label": digits.tolist()}, [str(digit) for digit in range(10)]
    if name != "text":
        rng.shuffle(rows)
    table = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    if name == "questions":
        table = {"id": [f"{split}-{number}" for number in range(len(rows))]} | table
    return table, class_names


@cache
def embedded_fingerprint(name: str) -> str:
    """Return a hash of what an embedded dataset is made from."""
    total = hashlib.sha256(str(VERSION).encode())
    if name != "digits":
        total.update(_SENTENCES.read_bytes())
    else:
        for images, labels in digit_images().values():
            total.update(images.tobytes() + labels.tobytes())
    return total.hexdigest()


# Text.


@cache
def embedded_sentences(split: SplitName) -> dict[str, list[str]]:
    """Return the sentences of each topic of a split in reading order; no sentence occurs twice."""
    sentences: dict[str, list[str]] = json.loads(gzip.decompress(_SENTENCES.read_bytes()))[split]
    return sentences


def embedded_passages(split: SplitName) -> dict[str, list[str]]:
    """Return the passages of each topic of a split: consecutive sentences with at least 16 words in total.

    The last passage of a topic may be shorter.
    """
    passages: dict[str, list[str]] = {}
    for topic, sentences in embedded_sentences(split).items():
        words: list[str] = []
        for number, sentence in enumerate(sentences, start=1):
            words += sentence.split()
            if len(words) >= _PASSAGE_WORDS or number == len(sentences):
                passages.setdefault(topic, []).append(" ".join(words))
                words = []
    return passages


# Classification tasks. Both labels are equally frequent.


def _pairs(split: SplitName, rng: random.Random) -> list[tuple[Any, ...]]:
    """Return pairs of neighboring passages of a topic, and these pairs with second passages from other topics.

    In each column, every passage occurs equally often with both labels, so that one column alone predicts nothing.
    Pairs that still have a partner of their own topic after ``_EXCHANGES`` rounds are dropped.
    """
    same = []
    for topic, passages in embedded_passages(split).items():
        for number, first in enumerate(passages):
            nearby = range(max(0, number - _MAX_DISTANCE), min(len(passages), number + _MAX_DISTANCE + 1))
            if neighbors := [neighbor for neighbor in nearby if neighbor != number]:
                same += [(topic, first, passages[rng.choice(neighbors)]) for _ in range(_COPIES[split])]
    partner = rng.sample(range(len(same)), len(same))
    for _ in range(_EXCHANGES):
        for i in [i for i, j in enumerate(partner) if same[i][0] == same[j][0]]:
            j = rng.randrange(len(partner))
            partner[i], partner[j] = partner[j], partner[i]
    rows: list[tuple[Any, ...]] = []
    for (topic, first, second), j in zip(same, partner, strict=True):
        if topic != same[j][0]:
            rows += [(first, second, 1), (first, same[j][2], 0)]
    return rows


def _sentences(split: SplitName, rng: random.Random) -> list[tuple[Any, ...]]:
    """Return each sentence and a corrupted copy of it, whose words are replaced by words of the training topics.

    These words also occur in original sentences; a separate vocabulary would reveal corrupted sentences.
    """
    words = {word for texts in embedded_sentences("train").values() for text in texts for word in text.split()}
    pool = sorted(filter(_is_lower_case_word, words))
    rows: list[tuple[Any, ...]] = []
    for sentences in embedded_sentences(split).values():
        for sentence in sentences * _COPIES[split]:
            if any(map(_is_lower_case_word, sentence.split())):
                rows += [(sentence, 1), (corrupt(sentence, pool, rng), 0)]
    return rows


def corrupt(sentence: str, pool: list[str], rng: random.Random) -> str:
    """Replace 30 % of the words, at least one, by other words of ``pool``.

    Only words of lower-case letters are replaced, so that case and punctuation do not reveal the corruption.

    Args:
        sentence: text with at least one word of lower-case letters.
        pool: two or more different words to draw from.
    """
    words = sentence.split()
    positions = [position for position, word in enumerate(words) if _is_lower_case_word(word)]
    for position in rng.sample(positions, min(max(1, round(_SHARE_REPLACED * len(words))), len(positions))):
        words[position] = rng.choice([word for word in rng.sample(pool, 2) if word != words[position]])
    return " ".join(words)


def _is_lower_case_word(word: str) -> bool:
    return re.fullmatch(r"[a-z]+", word) is not None


# Questions and labels of words.


def _questions(split: SplitName, rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield a clause of a sentence as the answer, and the rest of the sentence as the question, in SQuAD's columns."""
    for topic, sentences in embedded_sentences(split).items():
        for number, sentence in enumerate(sentences):
            for opening, pattern in QUESTION_PATTERNS.items():
                if not (match := re.search(pattern, sentence)):
                    continue
                words = f"{sentence[: match.start(1)]}{_GAP}{sentence[match.end(1) :]}".split()
                # Only the words around the gap are kept, so that the question identifies the clause in a long sentence.
                first = max(0, len(sentence[: match.start(1)].split()) - _QUESTION_WORDS // 2)
                question = f"{opening}: {' '.join(words[first : first + _QUESTION_WORDS]).rstrip('.,:;')}?"
                for _ in range(_CONTEXTS[split]):
                    num_previous, num_next = rng.randint(0, 2), rng.randint(0, 2)
                    previous = " ".join(sentences[max(0, number - num_previous) : number])
                    start = len(previous) + bool(previous) + match.start(1)
                    following = sentences[number + 1 : number + 1 + num_next]
                    context = " ".join(filter(None, [previous, sentence, *following]))
                    yield topic, context, question, {"text": [match[1]], "answer_start": [start]}


def _words(split: SplitName) -> Iterator[tuple[Any, ...]]:
    """Yield the words of the sentences with a name in them, and numbers of ``WORD_LABELS``.

    Exceptions, statements, types and versions of Python are found by rule.
    """
    for sentence in (text for texts in embedded_sentences(split).values() for text in texts):
        spans = [
            (match.start(), match.end(), kind)
            for kind, pattern in NAME_PATTERNS.items()
            for match in re.finditer(pattern, sentence)
        ]
        words, tags, previous = [], [], None
        for match in _TOKEN.finditer(sentence):
            span = next((span for span in spans if span[0] <= match.start() < span[1]), None)
            words.append(match.group())
            tags.append(0 if span is None else WORD_LABELS.index(f"{'I' if span == previous else 'B'}-{span[2]}"))
            previous = span
        if spans:
            yield words, tags


# Digits.


@cache
def digit_images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images (N, 8, 8), uint8, and digits (N,) by split; the assignment to splits is random, but fixed."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = np.rint(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(images))
    parts = np.split(order, [round(end * len(images)) for end in _DIGIT_ENDS])
    return {split: (images[np.sort(part)], labels[np.sort(part)]) for split, part in zip(SPLITS, parts, strict=True)}


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
