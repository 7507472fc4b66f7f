"""Several languages: corpora that read small ones more often, and splits of other configurations and data sets."""

from collections import Counter
from pathlib import Path

import pytest

from distill_runner.datasets.corpora.corpus import Corpus, quotas


def test_quotas_by_hand() -> None:
    """1000^0.7 = 125.9 and 10^0.7 = 5.01: shares of 96.2 and 3.8 %."""
    assert quotas([1000, 10], 0.7) == [971, 39]
    assert quotas([1000, 10], 1.0) == [1000, 10]


@pytest.fixture
def corpus_of_two(tmp_path: Path) -> dict[str, object]:
    for language, number in (("en", 100), ("sw", 5)):
        (tmp_path / language).mkdir()
        lines = [f"{language} {n}" for n in range(number)]
        (tmp_path / language / "train.txt").write_text("\n\n".join(lines))
    parts = {language: {"dataset": str(tmp_path / language), "columns": ["text"]} for language in ("en", "sw")}
    return {"name": "two", "parts": parts, "max_length": 16, "hold_out": 50}


def test_small_languages_are_read_more_often(corpus_of_two: dict[str, object]) -> None:
    plain, sampled = (Corpus(**corpus_of_two, exponent=exponent) for exponent in (None, 0.5))
    once = list(plain.texts("train"))
    assert len(once) == 98 + 4 == len(set(once))  # one document in 50 is held out
    found = Counter(sampled.texts("train"))
    of_language = Counter(text.split()[0] for text in found.elements())
    assert of_language == {"en": 85, "sw": 17}  # in proportion to the roots of 98 and 4
    assert set(found) <= set(once)
    assert {found[text] for text in found if text.startswith("sw")} == {4, 5}
    assert list(sampled.texts("validation")) == list(plain.texts("validation"))
    assert "exponent" not in plain.spec()
    assert sampled.spec()["exponent"] == 0.5
