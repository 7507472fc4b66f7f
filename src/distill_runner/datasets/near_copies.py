"""Near copies of texts: the same words up to case, punctuation and white space, or nearly the same.

A text is compared by its 3-grams of words, of which a sample of fixed size is drawn by their hashes (bottom-k sketches,
Broder 1997). A text of fewer than three words is one n-gram, so that only copies of it count.

Shapes: N examples with C texts each, K hashes of a text.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from zlib import crc32

import numpy as np

SAMPLE = 16
"""K: with so few, copies of long texts are found as surely, and a text takes 64 bytes."""
OVERLAP = 0.7
"""Least share of equal hashes, of the text that has more: six words of which the last differs share three of four."""
RAREST = 8
"""Hashes of an example by which others are searched for: those that the fewest examples have."""
AT_ONCE = 20_000
_NONE = np.uint32(2**32 - 1)
_WORD = re.compile(r"\w+")
_ENCODE = partial(str.encode, errors="surrogatepass")
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)


def sketches(texts: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the sorted sample of the hashes of each text, uint32 (N, C, K), which is filled up with the largest one.

    Args:
        texts: C lists of N texts.
    """
    sketches = np.full((len(texts[0]), len(texts), SAMPLE), _NONE, dtype=np.uint32)
    for column, own in enumerate(texts):
        hashes: dict[str, int] = {}
        for first in range(0, len(own), AT_ONCE):
            words = [_WORD.findall(text.casefold()) or [""] for text in own[first : first + AT_ONCE]]
            sizes = np.array([*map(len, words)])
            unseen = [*set(chain(*words)) - hashes.keys()]
            hashes.update(zip(unseen, map(crc32, map(_ENCODE, unseen)), strict=True))
            codes = np.fromiter(map(hashes.__getitem__, chain(*words)), np.uint64, int(sizes.sum())) + np.uint64(1)
            number = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
            remaining = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(codes))  # words up to the end of the text
            padded, mixed = np.append(codes, [0, 0]).astype(np.uint64), np.zeros(len(codes), dtype=np.uint64)
            for shift in range(3):
                mixed += np.where(remaining > shift, padded[shift : shift + len(codes)], 0) * _FACTORS[shift]
            is_gram = (remaining > 2) | (np.repeat(sizes, sizes) == remaining)
            grams = np.unique((number << np.uint64(32) | (mixed * _FACTORS[3]) >> np.uint64(32))[is_gram])
            rows = (grams >> np.uint64(32)).astype(np.int64)
            place = np.arange(len(rows)) - np.searchsorted(rows, rows)
            is_sampled = place < SAMPLE
            sketches[first + rows[is_sampled], column, place[is_sampled]] = grams[is_sampled].astype(np.uint32)
    return sketches


def near_copies(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of examples that are near copies in each of their texts, as their numbers, (P,) and (P,).

    Args:
        first: sketches (N, C, K) of the larger set.
        second: sketches (M, C, K).
    """
    import pandas as pd

    frames = []
    for own in (first, second):  # equal hashes of an example's first and second text differ
        is_hash, texts = own != _NONE, np.arange(own.shape[1], dtype=np.uint64)[:, None]
        hashes = (own | texts << np.uint64(32))[is_hash]
        frames.append(pd.DataFrame({"example": np.nonzero(is_hash)[0], "hash": hashes}))
    of_first, of_second = frames
    of_second["count"] = of_second["hash"].map(of_first["hash"].value_counts()).fillna(0)
    rarest = of_second.sort_values("count", kind="stable").groupby("example").head(RAREST)
    pairs = rarest.merge(of_first, on="hash", suffixes=("", "_of_first"))[["example", "example_of_first"]]
    numbers, others = pairs.drop_duplicates().sort_values([*pairs]).to_numpy().T
    is_near = np.ones(len(numbers), dtype=bool)
    for start in range(0, len(numbers), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        one, other = first[others[part]], second[numbers[part]]
        shared = ((one[..., :, None] == other[..., None, :]) & (one != _NONE)[..., None]).any(axis=-1).sum(axis=-1)
        sizes = np.maximum((one != _NONE).sum(axis=-1), (other != _NONE).sum(axis=-1))
        is_near[part] = (shared >= OVERLAP * sizes).all(axis=-1)
    return others[is_near], numbers[is_near]
