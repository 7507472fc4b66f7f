"""Write the rows of the embedded tasks to files beside the sentences that they are made of.

    PYTHONPATH=src python benchmarks/embedded_rows.py

The rows are drawn with Python's ``random``, whose draws differ between versions of Python: the files are of Python
3.11, and a test compares the hashes of its splits.
"""

import json
import lzma
import random
import re
from collections.abc import Iterator
from typing import Any

from distill_runner.datasets.embedded import (
    SPLITS,
    WORD_LABELS,
    embedded_passages,
    embedded_sentences,
    rows_file,
)

_MAX_DISTANCE = 2  # of the passages of a "same" pair: long topics change their subject
_COPIES = {"train": 3, "validation": 2, "test": 2}  # examples per passage or sentence and label
_EXCHANGES = 50  # rounds; all partners are then of another topic, unless one topic is most of the text
_SHARE_REPLACED = 0.3  # share of a sentence's words that a corruption replaces
_TOKEN = re.compile(r"\w+(?:\.\d+)*|[^\w\s]")
_GAP = "this"
_QUESTION_WORDS = 16
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
_CONTEXTS = {"train": 3, "validation": 1, "test": 1}
"""Number of contexts for each question, by split; each context draws its neighboring sentences anew."""


# Classification tasks. Both labels are equally frequent.


def _pairs(split: str, rng: random.Random) -> list[tuple[Any, ...]]:
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


def _sentences(split: str, rng: random.Random) -> list[tuple[Any, ...]]:
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


def _questions(split: str, rng: random.Random) -> Iterator[tuple[Any, ...]]:
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


def _words(split: str) -> Iterator[tuple[Any, ...]]:
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


def table(name: str, split: str) -> dict[str, list[Any]]:
    """Return the columns of a split."""
    rng = random.Random(f"{name}:{split}")
    rows, columns = {
        "pairs": lambda: (_pairs(split, rng), ("sentence1", "sentence2", "label")),
        "sentences": lambda: (_sentences(split, rng), ("sentence", "label")),
        "questions": lambda: (list(_questions(split, rng)), ("title", "context", "question", "answers")),
        "words": lambda: (list(_words(split)), ("tokens", "ner_tags")),
    }[name]()
    rng.shuffle(rows)
    content = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    ids = {"id": [f"{split}-{number}" for number in range(len(rows))]} if name == "questions" else {}
    return ids | content


if __name__ == "__main__":
    for name in ("pairs", "sentences", "questions", "words"):
        content = json.dumps({split: table(name, split) for split in SPLITS}, ensure_ascii=False)
        rows_file(name).write_bytes(lzma.compress(content.encode()))
