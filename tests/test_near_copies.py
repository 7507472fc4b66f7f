"""Texts of a validation or test split that the training data have too, up to a few characters or words."""

import csv
import random
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import TransferSet
from distill_runner.datasets.near_copies import near_copies, sketches
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.scores import training_scores

WORDS = ["".join(random.Random(number).choices(string.ascii_lowercase, k=5)) for number in range(300)]


def text_of(draw: random.Random, length: int) -> list[str]:
    return draw.choices(WORDS, k=length)


def changed(words: list[str], kind: int) -> str:
    """Six ways in which copies differ in published datasets; each leaves most 3-grams as they are."""
    return [
        " ".join(words).upper(),
        " ".join(words) + " .",
        '"' + " ,  ".join(words) + '"',
        " ".join([*words[:-1], "elephant"]),
        " ".join(["elephant", *words[1:]]),
        " ".join(words[:-1]),
    ][kind]


def test_six_hundred_changed_copies_are_found_and_nothing_else() -> None:
    draw = random.Random(0)
    texts = [text_of(draw, draw.randint(6, 40)) for _ in range(3000)]
    others = [changed(texts[5 * number], number % 6) for number in range(600)]
    others += [" ".join(text_of(draw, draw.randint(3, 40))) for _ in range(600)]
    first, second = near_copies(sketches([[*map(" ".join, texts)]]), sketches([others]))
    assert sorted(zip(second.tolist(), first.tolist(), strict=True)) == [(number, 5 * number) for number in range(600)]


@given(st.lists(st.text(string.ascii_letters + " .é世", max_size=20), min_size=1, max_size=8))
def test_words_alone_make_a_copy(texts: list[str]) -> None:
    """Without a match for each text of a pair, texts are no copies; a text is a copy of itself."""
    own, loud = sketches([texts]), sketches([[f"  {text.upper()}! " for text in texts]])
    pairs = {*zip(*(numbers.tolist() for numbers in near_copies(own, loud)), strict=True)}
    assert pairs >= {(number, number) for number in range(len(texts))}
    both = sketches([texts, [f"only {number} here" for number in range(len(texts))]])
    assert not len(near_copies(both, sketches([texts, ["another text of words"] * len(texts)]))[0])


@pytest.mark.parametrize("column", ["probabilities", None])
def test_leaks_are_left_out_of_training(tmp_path: Path, column: str | None) -> None:
    """With scores of another model in columns, their rows are left out with the texts."""
    draw = random.Random(1)
    train = [" ".join(text_of(draw, 12)) for _ in range(30)]
    rows = {"train": train, "validation": [f"{train[3]} elephant", "no copy of it"], "test": [train[7].upper(), "none"]}
    for name, texts in rows.items():
        with (tmp_path / f"{name}.csv").open("w") as stream:
            lines = [(text, "ab"[row % 2], 0.25, 0.75, text) for row, text in enumerate(texts)]
            csv.writer(stream).writerows([("text", "label", "0", "1", "second"), *lines])
    scores = {"probabilities": ["0", "1"]} if column else {}
    fields = {"name": "t", "dataset": str(tmp_path), "epochs": 1, "max_length": 8, "metrics": ["accuracy"], **scores}
    fields |= {"validation": {"validation": "validation"}, "columns": ["text"], "labels": ["a", "b"]}
    plain, dropping = (
        ClassificationTask(**fields, test={"test": "test"}, drop_leaks=drop).resolved() for drop in (False, True)
    )
    assert plain.spec() != dropping.spec()
    assert "drop_leaks" not in plain.spec()
    assert plain.spec() == ClassificationTask(**fields).resolved().spec()
    rest = [text for number, text in enumerate(train) if number not in (3, 7)]
    examples = dropping.examples("train")
    assert (plain.examples("train").texts, examples.texts) == ([train], [rest])
    assert examples.labels is not None
    assert examples.labels.tolist() == [number % 2 for number in range(30) if number not in (3, 7)]
    assert len(dropping.examples("validation")) == 2
    if column:
        parts = {"own": {"dataset": str(tmp_path), "columns": ["text"]}}
        transfer = TransferSet.model_validate({"name": "t", "parts": parts})
        assert int(training_scores(dropping, None).is_used.sum()) == len(rest)
        assert int(training_scores(dropping, transfer).is_used.sum()) == len(rest)
        pairs = dropping.model_copy(update={"columns": ["text", "second"]})
        assert int(training_scores(pairs, transfer).is_used.sum()) == len(train)  # a single text is no copy of a pair
    copies = dropping.model_copy(update={"train": "test", "test": {}, "validation": {"validation": "train"}})
    rest_of_file = "no copy but without a score,b,,\n" if column else ""
    (tmp_path / "test.csv").write_text(f"text,label,0,1\n{train[0]},a,0.5,0.5\n{rest_of_file}")
    with pytest.raises(UserError, match="all 1 training texts are near copies"):
        copies.examples("test")
