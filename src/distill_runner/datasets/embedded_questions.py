"""Questions about the embedded text, made by rule: a clause of a sentence is the answer, the rest of it the question.

Shaped like SQuAD. Topics are divided among the splits as for the other embedded tasks, so that no text leaks.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

from distill_runner.datasets.embedded import Split, embedded_sentences, topic_split

RULES: dict[str, str] = {
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
"""What is asked -> a pattern whose first group is the answer."""
_BLANK = "this"
_QUESTION_WORDS = 16
_AROUND = {"train": 3, "validation": 1, "test": 1}
"""Contexts in which a sentence of each split is asked about, each with other neighbours."""


def question_rows(split: Split) -> list[dict[str, Any]]:
    """The questions of a split in SQuAD's columns, the same in every process, in an order without meaning."""
    rng = random.Random(f"questions:{split}")
    rows = [
        row
        for topic, sentences in embedded_sentences().items()
        if topic_split(topic) == split
        for row in _about(topic, sentences, _AROUND[split], rng)
    ]
    rng.shuffle(rows)
    return [{"id": f"{split}-{number}", **row} for number, row in enumerate(rows)]


def _about(topic: str, sentences: list[str], contexts: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for place, sentence in enumerate(sentences):
        for asked, pattern in RULES.items():
            found = re.search(pattern, sentence)
            if not found:
                continue
            rest = f"{sentence[: found.start(1)]}{_BLANK}{sentence[found.end(1) :]}".split()
            # The words around the gap, so that a long sentence still says which clause is meant.
            first = max(0, len(sentence[: found.start(1)].split()) - _QUESTION_WORDS // 2)
            question = f"{asked}: {' '.join(rest[first : first + _QUESTION_WORDS]).rstrip('.,:;')}?"
            for _ in range(contexts):
                before, behind = rng.randint(0, 2), rng.randint(0, 2)
                ahead = " ".join(sentences[max(0, place - before) : place])
                start = len(ahead) + bool(ahead) + found.start(1)
                context = " ".join(filter(None, [ahead, sentence, *sentences[place + 1 : place + 1 + behind]]))
                answers = {"text": [found[1]], "answer_start": [start]}
                yield {"title": topic, "context": context, "question": question, "answers": answers}
