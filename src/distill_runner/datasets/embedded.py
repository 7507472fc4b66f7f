"""Embedded datasets, for trials without a download: real English text and handwritten digits.

The text is prose of Python's documentation (``python_docs``, with its license). It is used for pre-training, for two
classification tasks in the format of GLUE, for questions in the format of SQuAD and for labels of words. Whole topics,
not passages, are assigned to train, validation and test, so that no text is in two splits. The rows of the tasks are
in files, which ``benchmarks/embedded_rows.py`` has made of the sentences.

The digits are the 1,797 gray images of 8 x 8 pixels that scikit-learn ships: the test part of UCI's "Optical
Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998).
"""

import gzip
import hashlib
import io
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "validation", "test")
NAMES = ("pairs", "sentences", "questions", "words", "text", "digits")

_FOLDER = Path(__file__).parent / "python_docs"
_SENTENCES = _FOLDER / "sentences.json.gz"
_PASSAGE_WORDS = 16
_DIGIT_ENDS = (0.70, 0.85)  # shares of the digits at which the splits train and validation end
WORD_LABELS = ["O", *(f"{role}-{name}" for name in ("exception", "statement", "type", "version") for role in "BI")]
_CLASS_NAMES = {"pairs": ["different", "same"], "sentences": ["corrupted", "original"], "words": WORD_LABELS}


def embedded_columns(name: str, split: str) -> tuple[dict[str, list[Any]], list[str] | None]:
    """Return the columns of a split of an embedded dataset, and the names of its classes, if it has any.

    The columns are named as in the public datasets that they resemble: those of GLUE, SQuAD or an image dataset. The
    plain text has a column ``topic`` as well.

    Args:
        name: one of ``NAMES``.
    """
    if name == "digits":
        images, digits = digit_images()[split]
        return {"image": list(map(_png, images)), "label": digits.tolist()}, [str(digit) for digit in range(10)]
    if name == "text":
        passages = [(text, topic) for topic, texts in embedded_passages(split).items() for text in texts]
        return dict(zip(("text", "topic"), map(list, zip(*passages, strict=True)), strict=True)), None
    columns: dict[str, list[Any]] = json.loads(lzma.decompress(rows_file(name).read_bytes()))[split]
    return columns, _CLASS_NAMES.get(name)


@cache
def embedded_fingerprint(name: str) -> str:
    """Return a hash of what an embedded dataset is made from."""
    total = hashlib.sha256()
    if name == "digits":
        for images, labels in digit_images().values():
            total.update(images.tobytes() + labels.tobytes())
    else:
        total.update((_SENTENCES if name == "text" else rows_file(name)).read_bytes())
    return total.hexdigest()


def rows_file(name: str) -> Path:
    """Return the file with the rows of a task, by split and column."""
    return _FOLDER / f"{name}-rows.json.xz"


# Text.


@cache
def embedded_sentences(split: str) -> dict[str, list[str]]:
    """Return the sentences of each topic of a split in reading order; no sentence occurs twice."""
    sentences: dict[str, list[str]] = json.loads(gzip.decompress(_SENTENCES.read_bytes()))[split]
    return sentences


def embedded_passages(split: str) -> dict[str, list[str]]:
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
