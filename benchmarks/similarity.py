"""Measure the similarity of corpora: Spearman's S over the ranks of their most frequent words.

python -m benchmarks.similarity amazon_reviews/books amazon_reviews/dvd wiki_paragraphs
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
"""**assumption**: definition of a word, in lower case; the paper does not give one."""


def word_counts(texts: Iterable[str]) -> Counter[str]:
    """Count how often each word occurs, in lower case."""
    return Counter(word for text in texts for word in WORD.findall(text.lower()))


def spearman(first: Counter[str], second: Counter[str], n: int = 100, factor: float = 1.0) -> float:
    """Return S = ``1 - factor * sum(d_i^2) / (n (n^2 - 1))``, d_i a word's difference of ranks (Turc et al. 2019, 6.2).

    **assumption**: the n words are the most frequent words of both corpora taken at equal size, as in Kilgarriff and
    Rose (1998). They are ranked 1..n in each corpus; words with equal counts share their mean rank.

    Args:
        first, second: words with their counts, as from ``word_counts``.
        n: number of words.
        factor: 1 as the paper prints it, which gives S between 2/3 and 1; 6 gives Spearman's coefficient, -1 to 1.
    Raises:
        UserError: the two corpora together have fewer than ``n`` different words.
    """
    from scipy.stats import rankdata

    sizes = first.total(), second.total()
    shares = {word: first[word] / sizes[0] + second[word] / sizes[1] for word in first | second} if all(sizes) else {}
    if len(shares) < n:
        raise UserError(
            "corpus", None, f"the two have only {len(shares)} different words; S compares the {n} most frequent"
        )
    words = sorted(shares, key=lambda word: (-shares[word], word))[:n]
    ranks = [rankdata([-counts[word] for word in words]) for counts in (first, second)]
    return float(1 - factor * np.square(ranks[0] - ranks[1]).sum() / (n * (n**2 - 1)))


def similarity_table(counts: Mapping[str, Counter[str]], factor: float = 1.0) -> str:
    """Return a table of S for every pair of corpora."""
    width = max(map(len, counts))
    lines = [" " * width + "".join(f"  {number:>6}" for number in range(1, len(counts) + 1))]
    for name, row in counts.items():
        others = (f"  {spearman(row, other, factor=factor):6.3f}" for other in counts.values())
        lines.append(f"{name:<{width}}" + "".join(others))
    return "\n".join(lines)


def _part(name: str) -> CorpusPart:
    dataset, _, config = (name, "", "") if Path(name).is_dir() else name.partition("/")
    return CorpusPart(dataset=dataset, config=config or None, columns=["text"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print S as the paper defines it, and Spearman's coefficient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "datasets", nargs="+", metavar="DATASET[/CONFIG]", help="data set with a column text and a split train"
    )
    names = parser.parse_args(arguments).datasets
    try:
        counts = {name: word_counts(chain.from_iterable(_part(name).documents("train"))) for name in names}
        for factor, meaning in ((1.0, "S as printed"), (6.0, "Spearman's coefficient")):
            print(f"factor {factor:g}: {meaning}\n{similarity_table(counts, factor)}")
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
