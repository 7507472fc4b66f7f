"""The embedded corpus: real English text that every CPython ships, the documentation in ``pydoc_data.topics``.

The corpus is used for pre-training and for two labelled tasks in the format of GLUE. Whole topics, not passages, are
assigned to train, validation and test by a hash of the topic's name. No seed and no order can move text between splits.
"""

import hashlib
import random
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from distill_runner.common.errors import UserError

if TYPE_CHECKING:
    from distill_runner.datasets.examples import Examples

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Row = tuple[tuple[str, ...], int]  # texts and label of one example
PAIR_LABELS = ["different", "same"]
SENTENCE_LABELS = ["corrupted", "original"]
VERSION = 2  # raise it when cleaning, splitting or sampling changes

_SPLIT_SALT = 104  # with it, no topic is more than a third of a split (CPython 3.11 to 3.13)
_SPLIT_ENDS = {"train": 0.70, "validation": 0.85, "test": 1.0}
_MIN_SENTENCES = 1000
_PASSAGE_WORDS = 16
_NEIGHBOURS = 2  # largest distance of the passages of a "same" pair: long topics change their subject
_COPIES = {"train": 3, "validation": 2, "test": 2}  # examples per passage or sentence and label
_EXCHANGES = 50  # rounds; all partners are then of another topic, unless one topic is most of the text
_SHARE_REPLACED = 0.3  # share of a sentence's words that a corruption replaces

_TABLE_OR_CODE = re.compile(r"::=|>>>|^\s*[+|]|^[*=~^-]{3,}$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z(])")
_WORD = re.compile(r"\(?[A-Za-z][A-Za-z'-]*[,;:.)]*")


def normalise(text: str) -> str:
    """Reduce a text to lower-case ASCII letters, digits and single spaces, so that duplicates compare equal."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _plain(block: str) -> str:
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
    seen: set[str] = set()
    found: dict[str, list[str]] = {}
    for topic, text in sorted(_topics().items(), key=lambda item: (len(item[1]), item[0])):
        for block in re.split(r"\n\s*\n", text):
            if _TABLE_OR_CODE.search(block):
                continue
            for sentence in filter(_is_prose, _SENTENCE_END.split(_plain(block))):
                if (key := normalise(sentence)) not in seen:
                    seen.add(key)
                    found.setdefault(topic, []).append(sentence)
    if len(seen) < _MIN_SENTENCES:
        problem = f"this Python installation has only {len(seen)} sentences for the embedded data"
        raise UserError("pydoc_data.topics", None, problem, "Use a complete installation of CPython.")
    return found


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


def topic_split(topic: str) -> Split:
    """Return the split of a topic by a hash of its name alone; about 70 % of the text is in the training split."""
    place = int(hashlib.sha256(f"{_SPLIT_SALT}:{topic}".encode()).hexdigest()[:8], 16) / 2**32
    return next(split for split in SPLITS if place < _SPLIT_ENDS[split])


def embedded_text(split: Split) -> list[str]:
    """Return the passages of all topics of one split, for masked-language-model pre-training."""
    return [text for texts in _of_split(embedded_passages(), split).values() for text in texts]


@cache
def embedded_fingerprint() -> str:
    """Return a hash of the embedded corpus and of ``VERSION``, which covers the data derived from it."""
    parts = [str(VERSION), *(text for split in SPLITS for text in embedded_text(split))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def demo_task(name: str) -> dict[str, "Examples"]:
    """Return the examples of an embedded task by split; both labels are equally frequent.

    The examples are the same in every process.

    Args:
        name: ``pairs`` (two passages, `PAIR_LABELS`: whether they are from one topic) or ``sentences`` (one sentence,
            `SENTENCE_LABELS`: whether it is unchanged).

    Raises:
        UserError: there is no task of this name.
    """
    rows = {"pairs": _pairs, "sentences": _sentences}.get(name)
    if rows is None:
        raise UserError("task.dataset", f"embedded:{name}", "no such task", "Known: pairs, sentences.")
    return {split: _examples(rows, split, random.Random(f"{name}:{split}")) for split in SPLITS}


def _of_split(texts: dict[str, list[str]], split: Split) -> dict[str, list[str]]:
    return {topic: texts[topic] for topic in texts if topic_split(topic) == split}


def _examples(make: Callable[[Split, random.Random], list[Row]], split: Split, rng: random.Random) -> "Examples":
    from distill_runner.datasets.examples import Examples

    rows = make(split, rng)
    rng.shuffle(rows)
    columns = [list(column) for column in zip(*(texts for texts, _ in rows), strict=True)]
    return Examples(texts=columns, labels=np.array([label for _, label in rows], dtype=np.int64))


def _pairs(split: Split, rng: random.Random) -> list[Row]:
    """Return pairs of neighbouring passages of a topic, and these pairs with second passages from other topics.

    In each column, every passage occurs equally often with both labels, so that one column alone predicts nothing.
    Pairs that still have a partner of their own topic after ``_EXCHANGES`` rounds are dropped.
    """
    same = [
        (topic, first, texts[rng.choice(near)])
        for topic, texts in _of_split(embedded_passages(), split).items()
        for place, first in enumerate(texts)
        if (near := _near(place, len(texts)))
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


def _near(place: int, size: int) -> list[int]:
    return [p for p in range(max(0, place - _NEIGHBOURS), min(size, place + _NEIGHBOURS + 1)) if p != place]


def _sentences(split: Split, rng: random.Random) -> list[Row]:
    pool = _replacements()
    rows: list[Row] = []
    for sentences in _of_split(embedded_sentences(), split).values():
        for sentence in sentences * _COPIES[split]:
            if _replaceable(sentence):
                rows += [((sentence,), 1), ((corrupt(sentence, pool, rng),), 0)]
    return rows


def _replacements() -> list[str]:
    """Return the lower-case words of the training topics.

    These words also occur in original sentences; a separate vocabulary would reveal corrupted sentences.
    """
    texts = _of_split(embedded_sentences(), "train").values()
    return sorted(
        {word for sentences in texts for sentence in sentences for word in sentence.split() if _plain_word(word)}
    )


def _plain_word(word: str) -> bool:
    return re.fullmatch(r"[a-z]+", word) is not None


def _replaceable(sentence: str) -> list[int]:
    return [place for place, word in enumerate(sentence.split()) if _plain_word(word)]


def corrupt(sentence: str, pool: list[str], rng: random.Random) -> str:
    """Replace 30 % of the words, at least one, by other words of ``pool``.

    Only words of lower-case letters are replaced, so that case and punctuation do not reveal the corruption.

    Args:
        sentence: text with at least one word of lower-case letters.
        pool: two or more different words to draw from.
    """
    words = sentence.split()
    places = _replaceable(sentence)
    for place in rng.sample(places, min(max(1, round(_SHARE_REPLACED * len(words))), len(places))):
        words[place] = rng.choice([word for word in rng.sample(pool, 2) if word != words[place]])
    return " ".join(words)
