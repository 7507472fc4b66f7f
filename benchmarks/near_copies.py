"""Near copies between splits: made cases that are found, pairs of real data and how alike they are, and seconds.

The tables of docs/account.md: ``DISTILL_DATA_DIR=<folder> python -m benchmarks.near_copies``.
"""

import os
import random
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from glob import glob
from pathlib import Path

import numpy as np
import pandas as pd

from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.near_copies import near_copies, sketches

Words = list[str]
KINDS: dict[str, Callable[[Words, random.Random], Words]] = {
    "capital letters": lambda words, _: [word.upper() for word in words],
    "another full stop": lambda words, _: [*words[:-1], f"{words[-1]} ..."],
    "white space and quotation marks": lambda words, _: ['"', *[f"{word} " for word in words], '"'],
    "another last word": lambda words, _: [*words[:-1], "zebra"],
    "another first word": lambda words, _: ["zebra", *words[1:]],
    "one word inserted": lambda words, r: _inserted(words, r.randrange(2, len(words) - 1)),
}
"""Made changes; a text has at least eight words."""
DATA = {
    "rte": ("glue/rte", "validation", ["sentence1", "sentence2"]),
    "mrpc": ("glue/mrpc", "validation", ["sentence1", "sentence2"]),
    "cola": ("glue/cola", "validation", ["sentence"]),
    "sst2": ("glue/sst2", "validation", ["sentence"]),
    "stsb": ("glue/stsb", "validation", ["sentence1", "sentence2"]),
    "wnli": ("glue/wnli", "validation", ["sentence1", "sentence2"]),
    "imdb": ("imdb/plain_text", "test", ["text"]),
    "wnut17": ("wnut_17/wnut_17", "validation", ["tokens"]),
}
ALIKE = 0.6
"""Share of the words of two texts in common order below which a pair counts as a false alarm."""


def _inserted(words: Words, place: int) -> Words:
    return [*words[:place], "zebra", *words[place:]]


def columns(folder: str, split: str, names: list[str]) -> list[list[str]]:
    files = sorted(glob(str(Path(os.environ["DISTILL_DATA_DIR"], folder, f"{split}*.parquet"))))
    table = pd.concat([pd.read_parquet(file) for file in files])
    return [[text if isinstance(text, str) else " ".join(text) for text in table[name]] for name in names]


def made_cases(texts: list[str], count: int = 100) -> list[tuple[str, str, int]]:
    """Return kind, number of texts, and number of those that are found again among all texts, after a change."""
    draw = random.Random(0)
    long = [text for text in texts if len(text.split()) >= 8]
    sample, own = draw.sample(range(len(long)), count), sketches([long])
    rows = []
    for kind, change in KINDS.items():
        changed = [" ".join(change(long[number].split(), draw)) for number in sample]
        first, second = near_copies(own, sketches([changed]))
        pairs = set(zip(first.tolist(), second.tolist(), strict=True))
        rows.append((kind, str(count), sum((number, place) in pairs for place, number in enumerate(sample))))
    return rows


def alike(first: str, second: str) -> float:
    return SequenceMatcher(None, first.casefold().split(), second.casefold().split(), autojunk=False).ratio()


def main() -> None:
    rows = [
        [kind, count, str(hits)]
        for kind, count, hits in made_cases(columns(*DATA["sst2"][:1], "train", ["sentence"])[0])
    ]
    print(markdown_table(["change of 100 texts of SST-2", "texts", "pairs that are found"], rows))
    rows = []
    for name, (folder, split, names) in DATA.items():
        train, other = columns(folder, "train", names), columns(folder, split, names)
        start = time.process_time()
        first, second = near_copies(sketches(train), sketches(other))
        seconds = time.process_time() - start
        exact = {*zip(*train, strict=True)}
        copies = sum(row in exact for row in zip(*other, strict=True))
        ratios = [
            min(alike(one[a], two[b]) for one, two in zip(train, other, strict=True))
            for a, b in zip(first, second, strict=True)
        ]
        false = len({b for b, ratio in zip(second.tolist(), ratios, strict=True) if ratio < ALIKE}
                    - {b for b, ratio in zip(second.tolist(), ratios, strict=True) if ratio >= ALIKE})  # fmt: skip
        counts = [
            f"{len(train[0]):,}",
            f"{len(other[0]):,}",
            f"{len(np.unique(second)):,}",
            f"{copies:,}",
            f"{false:,}",
        ]
        rows.append([name, *counts, f"{seconds:.1f}"])
    print(
        markdown_table(["data", "training texts", "others", "near copies", "exact copies", "not alike", "CPU s"], rows)
    )
    words = [word for text in columns("imdb/plain_text", "train", ["text"])[0] for word in text.split()]
    million = [" ".join(words[start : start + 15]) for start in range(0, 15 * 320_000, 15)]
    numbers = np.random.default_rng(0).integers(len(words), size=(1_000_000 - len(million), 15)).tolist()
    million += [" ".join([words[number] for number in row]) for row in numbers]
    start = time.process_time()
    own = sketches([million])
    middle = time.process_time()
    pairs = near_copies(own, sketches([million[:10_000]]))
    print(f"a million texts of 15 words: {middle - start:.0f} s for the sketches, {time.process_time() - middle:.0f} s "
          f"to compare them with 10,000 of them, {len(np.unique(pairs[1])):,} found")  # fmt: skip


if __name__ == "__main__":
    main()
