"""Spearman's S between corpora, against numbers worked out by hand and scipy."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.similarity import main, spearman, word_counts
from distill_runner.common.errors import UserError


def test_words_are_counted_in_lower_case() -> None:
    assert word_counts(["The cat's 2 cats_", "the CAT"]) == {"the": 2, "cat's": 1, "cats": 1, "cat": 1}


def test_four_words_by_hand() -> None:
    """Ranks 1, 2, 3, 4 against 2, 1, 4, 3: d = 1 four times, 4 / (4 * 15) = 1/15."""
    first, second = Counter(a=8, b=6, c=4, d=2, x=1), Counter(a=6, b=8, c=2, d=4, y=1)
    assert spearman(first, second, n=4) == pytest.approx(1 - 1 / 15)
    assert spearman(first, second, n=4, factor=6) == pytest.approx(1 - 6 / 15)


@given(st.permutations(range(1, 31)))
def test_factor_six_is_spearmans_coefficient(counts: list[int]) -> None:
    from scipy.stats import spearmanr

    words = [f"w{number}" for number in range(30)]
    first, second = Counter(dict(zip(words, range(1, 31), strict=True))), Counter(dict(zip(words, counts, strict=True)))
    assert spearman(first, second, n=30, factor=6) == pytest.approx(spearmanr(range(1, 31), counts)[0])
    assert 2 / 3 - 1e-12 <= spearman(first, second, n=30) <= 1  # as the paper prints it, S cannot be lower


def test_too_few_words_are_refused() -> None:
    with pytest.raises(UserError, match="3 different words; S compares the 100"):
        spearman(Counter(a=1, b=1), Counter(c=1))
    with pytest.raises(UserError, match="0 different words"):
        spearman(Counter(a=1), Counter())


def test_the_command_compares_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = [f"{first}{second}" for first in "abcdefghij" for second in "klmnopqrst"]
    for name, words in (("one", letters), ("two", letters[::-1])):
        (tmp_path / name).mkdir()
        rows = [word for number, word in enumerate(words, start=1) for _ in range(number)]
        (tmp_path / name / "train.csv").write_text("text\n" + "\n".join(rows))
    main([str(tmp_path / "one"), str(tmp_path / "two")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "factor 1: S as printed"
    assert printed[2].split()[1:] == ["1.000", "0.667"]
    assert printed[6].split()[1:] == ["1.000", "-1.000"]
    with pytest.raises(SystemExit):
        main(["nowhere"])
    assert "parts.dataset=nowhere" in capsys.readouterr().err
