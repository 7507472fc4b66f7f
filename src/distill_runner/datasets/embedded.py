"""Embedded datasets, for trials without a download: real English text and handwritten digits.

The text is the documentation in ``pydoc_data.topics``, which every CPython ships. It is used for pre-training, for two
classification tasks in the format of GLUE and for questions in the format of SQuAD. Whole topics, not passages, are
assigned to train, validation and test by a hash of the topic's name. No seed and no order can move text between splits.

The digits are the 1,797 gray images of 8 x 8 pixels that scikit-learn ships: the test part of UCI's "Optical
Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998).
"""

import hashlib
import io
import random
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Literal, get_args

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.tokenization import Examples

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
NAMES = ("pairs", "sentences", "questions", "words", "text", "digits")
Row = tuple[tuple[str, ...], int]  # texts and label of one example
PAIR_LABELS = ["different", "same"]
SENTENCE_LABELS = ["corrupted", "original"]
_NAME_TYPES = ("exception", "statement", "type", "version")
WORD_LABELS = ["O", *(f"{role}-{name}" for name in _NAME_TYPES for role in "BI")]
VERSION = 2  # raise it when cleaning, splitting or sampling changes

_SPLIT_SALT = 104  # with it, no topic is more than a third of a split (CPython 3.11 to 3.13)
_SPLIT_ENDS = {"train": 0.70, "validation": 0.85, "test": 1.0}
_MIN_SENTENCES = 1000
_PASSAGE_WORDS = 16
_MAX_DISTANCE = 2  # of the passages of a "same" pair: long topics change their subject
_COPIES = {"train": 3, "validation": 2, "test": 2}  # examples per passage or sentence and label
_EXCHANGES = 50  # rounds; all partners are then of another topic, unless one topic is most of the text
_SHARE_REPLACED = 0.3  # share of a sentence's words that a corruption replaces

_TABLE_OR_CODE = re.compile(r"::=|>>>|^\s*[+|]|^[*=~^-]{3,}$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z(])")
_WORD = re.compile(r"\(?[A-Za-z][A-Za-z'-]*[,;:.)]*")

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
_TOKEN = re.compile(r"\w+(?:\.\d+)*|[^\w\s]")
_GAP = "this"
_QUESTION_WORDS = 16
_CONTEXTS = {"train": 3, "validation": 1, "test": 1}
"""Number of contexts for each question, by split; each context draws its neighboring sentences anew."""


def embedded_columns(name: str, split: SplitName) -> tuple[dict[str, list[Any]], list[str] | None]:
    """Return the columns of a split of an embedded dataset, and the names of its classes, if it has any.

    The columns are named as in the public datasets that they resemble: those of GLUE, SQuAD or an image dataset. The
    plain text has a column ``topic`` as well.

    Args:
        name: one of ``NAMES``.
    """
    if name == "text":
        topics = _in_split(embedded_passages(), split)
        texts = [text for passages in topics.values() for text in passages]
        return {"text": texts, "topic": [topic for topic, passages in topics.items() for _ in passages]}, None
    if name == "questions":
        rows = question_rows(split)
        return {column: [row[column] for row in rows] for column in rows[0]}, None
    if name == "words":
        rows = word_rows(split)
        return {column: [row[column] for row in rows] for column in rows[0]}, WORD_LABELS
    if name == "digits":
        images, digits = digit_images()[split]
        return {"image": list(map(_png, images)), "label": digits.tolist()}, [str(digit) for digit in range(10)]
    examples = demo_examples(name, split)
    assert examples.labels is not None
    columns = dict(
        zip(["sentence"] if len(examples.texts) == 1 else ["sentence1", "sentence2"], examples.texts, strict=True)
    )
    return columns | {"label": examples.labels.tolist()}, PAIR_LABELS if name == "pairs" else SENTENCE_LABELS


@cache
def text_fingerprint() -> str:
    """Return a hash of the embedded text and of ``VERSION``, which covers the data derived from it."""
    parts = [str(VERSION), *(text for split in SPLITS for text in embedded_text(split))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digits_fingerprint() -> str:
    """Return a hash of the images, the labels and their assignment to splits."""
    total = hashlib.sha256()
    for name, (images, labels) in digit_images().items():
        total.update(name.encode() + images.tobytes() + labels.tobytes())
    return total.hexdigest()


# Text.


def normalize(text: str) -> str:
    """Reduce a text to lower-case ASCII letters, digits and single spaces, so that duplicates compare equal."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _plain_text(block: str) -> str:
    """Turn a paragraph into one line of prose without bullets, quotation marks, emphasis and underscores."""
    text = re.sub(r"-\n\s*", "-", block).strip()
    text = re.sub(r"^(\*|-|\d+\.|\[\d+\])\s+", "", text)
    text = re.sub(r"\[\d+\]|\(\)|[_*\"“”`‘]", " ", text).replace("’", "'")
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<=\()\s+|\s+(?=[.,;:)?!])", "", text)


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    if len(words) < 6 or not sentence[0].isupper() or sentence[-1] not in ".:!?":
        return False
    return sum(bool(_WORD.fullmatch(word)) for word in words) >= 0.8 * len(words)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split the standard library
        return {}
    return topics


@lru_cache(maxsize=1)
def embedded_sentences() -> dict[str, list[str]]:
    """Return the sentences of each topic in reading order, without duplicates.

    Large topics repeat smaller ones word for word; a sentence is kept in the smallest topic that contains it.

    Raises:
        UserError: this Python was installed without its documentation topics, or has too few of them.
    """
    normalized: set[str] = set()
    sentences: dict[str, list[str]] = {}
    for topic, text in sorted(_topics().items(), key=lambda item: (len(item[1]), item[0])):
        for block in re.split(r"\n\s*\n", text):
            if _TABLE_OR_CODE.search(block):
                continue
            for sentence in filter(_is_prose, _SENTENCE_END.split(_plain_text(block))):
                if (key := normalize(sentence)) not in normalized:
                    normalized.add(key)
                    sentences.setdefault(topic, []).append(sentence)
    if len(normalized) < _MIN_SENTENCES:
        problem = f"this Python installation has only {len(normalized)} sentences for the embedded data"
        raise UserError("pydoc_data.topics", None, problem, "Use a complete installation of CPython.")
    return sentences


def embedded_passages() -> dict[str, list[str]]:
    """Return the passages of each topic: consecutive sentences with at least 16 words in total.

    The last passage of a topic may be shorter.
    """
    passages: dict[str, list[str]] = {}
    for topic, sentences in embedded_sentences().items():
        words: list[str] = []
        for sentence in sentences:
            words += sentence.split()
            if len(words) >= _PASSAGE_WORDS:
                passages.setdefault(topic, []).append(" ".join(words))
                words = []
        if words:
            passages.setdefault(topic, []).append(" ".join(words))
    return passages


def topic_split(topic: str) -> SplitName:
    """Return the split of a topic by a hash of its name alone; about 70 % of the text is in the training split."""
    fraction = int(hashlib.sha256(f"{_SPLIT_SALT}:{topic}".encode()).hexdigest()[:8], 16) / 2**32
    return next(split for split in SPLITS if fraction < _SPLIT_ENDS[split])


def embedded_text(split: SplitName) -> list[str]:
    """Return the passages of all topics of one split, for masked-language-model pre-training."""
    return [text for texts in _in_split(embedded_passages(), split).values() for text in texts]


def _in_split(texts: dict[str, list[str]], split: SplitName) -> dict[str, list[str]]:
    return {topic: texts[topic] for topic in texts if topic_split(topic) == split}


# Classification tasks.


def demo_examples(name: str, split: SplitName) -> Examples:
    """Return the examples of an embedded classification task; both labels are equally frequent.

    The examples are the same in every process.

    Args:
        name: ``pairs`` (two passages, `PAIR_LABELS`: whether they are from one topic) or ``sentences`` (one sentence,
            `SENTENCE_LABELS`: whether it is unchanged).
    """
    rng = random.Random(f"{name}:{split}")
    rows = {"pairs": _pairs, "sentences": _sentences}[name](split, rng)
    rng.shuffle(rows)
    columns = [list(column) for column in zip(*(texts for texts, _ in rows), strict=True)]
    return Examples(texts=columns, labels=np.array([label for _, label in rows], dtype=np.int64))


def _pairs(split: SplitName, rng: random.Random) -> list[Row]:
    """Return pairs of neighboring passages of a topic, and these pairs with second passages from other topics.

    In each column, every passage occurs equally often with both labels, so that one column alone predicts nothing.
    Pairs that still have a partner of their own topic after ``_EXCHANGES`` rounds are dropped.
    """
    same = [
        (topic, first, passages[rng.choice(neighbors)])
        for topic, passages in _in_split(embedded_passages(), split).items()
        for number, first in enumerate(passages)
        if (neighbors := _neighbors(number, len(passages)))
        for _ in range(_COPIES[split])
    ]
    partner = rng.sample(range(len(same)), len(same))
    for _ in range(_EXCHANGES):
        for i in [i for i, j in enumerate(partner) if same[i][0] == same[j][0]]:
            j = rng.randrange(len(partner))
            partner[i], partner[j] = partner[j], partner[i]
    rows: list[Row] = []
    for (topic, first, second), j in zip(same, partner, strict=True):
        if topic != same[j][0]:
            rows += [((first, second), 1), ((first, same[j][2]), 0)]
    return rows


def _neighbors(number: int, size: int) -> list[int]:
    first, last = max(0, number - _MAX_DISTANCE), min(size, number + _MAX_DISTANCE + 1)
    return [neighbor for neighbor in range(first, last) if neighbor != number]


def _sentences(split: SplitName, rng: random.Random) -> list[Row]:
    pool = _replacement_words()
    rows: list[Row] = []
    for sentences in _in_split(embedded_sentences(), split).values():
        for sentence in sentences * _COPIES[split]:
            if _replaceable_positions(sentence):
                rows += [((sentence,), 1), ((corrupt(sentence, pool, rng),), 0)]
    return rows


def _replacement_words() -> list[str]:
    """Return the lower-case words of the training topics.

    These words also occur in original sentences; a separate vocabulary would reveal corrupted sentences.
    """
    texts = _in_split(embedded_sentences(), "train").values()
    words = {word for sentences in texts for sentence in sentences for word in sentence.split()}
    return sorted(filter(_is_lower_case_word, words))


def _is_lower_case_word(word: str) -> bool:
    return re.fullmatch(r"[a-z]+", word) is not None


def _replaceable_positions(sentence: str) -> list[int]:
    return [position for position, word in enumerate(sentence.split()) if _is_lower_case_word(word)]


def corrupt(sentence: str, pool: list[str], rng: random.Random) -> str:
    """Replace 30 % of the words, at least one, by other words of ``pool``.

    Only words of lower-case letters are replaced, so that case and punctuation do not reveal the corruption.

    Args:
        sentence: text with at least one word of lower-case letters.
        pool: two or more different words to draw from.
    """
    words, positions = sentence.split(), _replaceable_positions(sentence)
    for position in rng.sample(positions, min(max(1, round(_SHARE_REPLACED * len(words))), len(positions))):
        words[position] = rng.choice([word for word in rng.sample(pool, 2) if word != words[position]])
    return " ".join(words)


# Questions.


def question_rows(split: SplitName) -> list[dict[str, Any]]:
    """Return the questions of a split in SQuAD's columns, shuffled; they are the same in every process.

    A clause of a sentence is the answer; the rest of the sentence is the question.
    """
    rng = random.Random(f"questions:{split}")
    rows = [
        row
        for topic, sentences in _in_split(embedded_sentences(), split).items()
        for row in _topic_questions(topic, sentences, _CONTEXTS[split], rng)
    ]
    rng.shuffle(rows)
    return [{"id": f"{split}-{number}", **row} for number, row in enumerate(rows)]


def _topic_questions(
    topic: str, sentences: list[str], num_contexts: int, rng: random.Random
) -> Iterator[dict[str, Any]]:
    for number, sentence in enumerate(sentences):
        for opening, pattern in QUESTION_PATTERNS.items():
            match = re.search(pattern, sentence)
            if not match:
                continue
            words = f"{sentence[: match.start(1)]}{_GAP}{sentence[match.end(1) :]}".split()
            # Only the words around the gap are kept, so that the question identifies the clause in a long sentence.
            first = max(0, len(sentence[: match.start(1)].split()) - _QUESTION_WORDS // 2)
            question = f"{opening}: {' '.join(words[first : first + _QUESTION_WORDS]).rstrip('.,:;')}?"
            for _ in range(num_contexts):
                num_previous, num_next = rng.randint(0, 2), rng.randint(0, 2)
                previous = " ".join(sentences[max(0, number - num_previous) : number])
                start = len(previous) + bool(previous) + match.start(1)
                following = sentences[number + 1 : number + 1 + num_next]
                context = " ".join(filter(None, [previous, sentence, *following]))
                answers = {"text": [match[1]], "answer_start": [start]}
                yield {"title": topic, "context": context, "question": question, "answers": answers}


# Labels of words.


def word_rows(split: SplitName) -> list[dict[str, Any]]:
    """Return sentences with a name in them as ``tokens`` and ``ner_tags``, numbers of ``WORD_LABELS``.

    Exceptions, statements and versions of Python are found by rule. A sentence without any is left out.
    """
    rows = []
    for sentences in _in_split(embedded_sentences(), split).values():
        for sentence in sentences:
            spans = [
                (match.start(), match.end(), kind)
                for kind, pattern in NAME_PATTERNS.items()
                for match in re.finditer(pattern, sentence)
            ]
            if not spans:
                continue
            words = [(match.group(), match.start()) for match in _TOKEN.finditer(sentence)]
            tags, previous = [], None
            for _, start in words:
                span = next((span for span in spans if span[0] <= start < span[1]), None)
                tags.append(0 if span is None else WORD_LABELS.index(f"{'I' if span == previous else 'B'}-{span[2]}"))
                previous = span
            rows.append({"tokens": [word for word, _ in words], "ner_tags": tags})
    random.Random(f"words:{split}").shuffle(rows)
    return rows


# Digits.


@lru_cache(maxsize=1)
def digit_images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images (N, 8, 8), uint8, and digits (N,) by split; the assignment to splits is random, but fixed."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = np.rint(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(images))
    parts = np.split(order, [round(_SPLIT_ENDS[split] * len(images)) for split in SPLITS[:-1]])
    return {split: (images[np.sort(part)], labels[np.sort(part)]) for split, part in zip(SPLITS, parts, strict=True)}


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
