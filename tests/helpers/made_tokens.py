"""Sentences with names that a rule finds: a small dataset of words and tags."""

import json
import random
from pathlib import Path
from typing import Any

from helpers.words import WORDS

NAMES = ["O", "B-place", "I-place", "B-thing", "I-thing"]
CUES = {"river": "place", "garden": "place", "stone": "thing", "letter": "thing"}
"""Words that begin a name, which the next word continues if it is ``bright`` or ``heavy``."""


def made_rows(count: int, seed: int, longest: int = 24) -> list[dict[str, Any]]:
    """Rows of ``tokens`` and ``ner_tags``, numbers of ``NAMES``; the fifth has no words."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(1, longest))
        tags, kind = [], ""
        for word in words:
            continues = bool(kind) and word in ("bright", "heavy")
            kind = kind if continues else CUES.get(word, "")
            tags.append(NAMES.index(f"{'I' if continues else 'B'}-{kind}") if kind else 0)
        rows.append({"tokens": words, "ner_tags": tags})
    rows[4:5] = [{"tokens": [], "ner_tags": []}]
    return rows


def save_rows(folder: Path, counts: dict[str, int]) -> Path:
    """Write splits of made rows with names of tags as JSON lines."""
    folder.mkdir(exist_ok=True)
    for seed, (split, count) in enumerate(counts.items()):
        rows = [{**row, "ner_tags": [NAMES[tag] for tag in row["ner_tags"]]} for row in made_rows(count, seed)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
