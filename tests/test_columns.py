"""Which columns become the texts and the label: never one that holds the label in another form."""

import csv
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.tasks import make_task
from distill_runner.tasks.columns import as_pair, leak, printed_value
from helpers.words import WORDS

ROWS = 60
Columns = dict[str, list[Any]]


def noise(seed: int, rows: int = ROWS) -> list[str]:
    """Texts that say nothing about any label."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(rows)]


def save(folder: Path, columns: Columns, form: str) -> Path:
    """A folder of training and validation files; the first two thirds of the rows are for training."""
    folder.mkdir(exist_ok=True)
    size = len(next(iter(columns.values())))
    for split, rows in (("train", slice(None, 2 * size // 3)), ("validation", slice(2 * size // 3, None))):
        part = {name: values[rows] for name, values in columns.items()}
        file = folder / f"{split}.{form}"
        if form == "csv":
            with file.open("w", newline="") as stream:
                csv.writer(stream).writerows([part, *zip(*part.values(), strict=True)])
        elif form == "jsonl":
            lines = (json.dumps(dict(zip(part, row, strict=True))) for row in zip(*part.values(), strict=True))
            file.write_text("\n".join(lines))
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table(part), file)
    return folder


def task(folder: Path, **fields: Any) -> Any:
    plain = {"name": "own", "dataset": str(folder), "metrics": None, "max_length": 32, "epochs": 1}
    return make_task(**plain | {"validation": {"validation": "validation"}} | fields)


def read(folder: Path, columns: Columns, form: str = "csv", **fields: Any) -> tuple[list[str], Any]:
    found = task(save(folder, columns, form), **fields).resolved()
    return found.columns, found.label


# --- Layouts

LABEL_NAMES = ("label", "labels", "class", "target", "sentiment", "stars")
TEXT_NAMES = re.findall(r"\w+", "text sentence review question premise sentence1 text_a query content url id")
OTHERS = """label_text labelText gold category verdict polarity answer hypothesis sentence2 text_b context passage title
    target_text explanation annotator1 score idx pairID"""
OTHER_NAMES = re.findall(r"\w+", OTHERS)


def derived(labels: Sequence[str], form: str, seed: int) -> list[Any]:
    """A column made from the label, and from nothing else but chance."""
    rng, names = random.Random(seed), sorted(set(labels))
    words = {name: f"class {word}" for name, word in zip(names, ("negative", "positive", "neutral"), strict=False)}
    match form:
        case "words":
            return [words[label] for label in labels]
        case "number":
            return [names.index(label) for label in labels]
        case "finer":
            return [f"{words[label]} {rng.randint(1, 2)}" for label in labels]
        case "noisy":
            return [words[label if rng.random() < 0.9 else rng.choice(names)] for label in labels]
        case "prefix":
            return [f"{words[label].split()[1]}: {' '.join(rng.choices(WORDS, k=6))}" for label in labels]
    return [" ".join(rng.choices(WORDS, k=5)) for _ in labels]


FORMS = ("words", "number", "finer", "noisy", "prefix", "noise")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_layout_that_is_accepted_reads_the_label(tmp_path: Path, data: st.DataObject) -> None:
    """SetFit's layout has the label's own name as a third column: read as a text, it scores 100 on noise."""
    draw, seed = data.draw, data.draw(st.integers(0, 99))
    rng = random.Random(seed)
    classes = draw(st.sampled_from([("0", "1"), ("neg", "pos"), ("a", "b", "c")]))
    labels = [rng.choice(classes) for _ in range(ROWS)]
    label_name, text_name = draw(st.sampled_from(LABEL_NAMES)), draw(st.sampled_from(TEXT_NAMES))
    columns: Columns = {text_name: noise(seed), label_name: labels}
    others = draw(st.lists(st.sampled_from(OTHER_NAMES), max_size=3, unique=True))
    harmless = {text_name}
    for number, name in enumerate(set(others) - {*columns}):
        form = draw(st.sampled_from(FORMS))
        columns[name] = derived(labels, form, seed + number + 1)
        harmless |= {name} if form == "noise" else set()
    order = draw(st.permutations(list(columns)))
    form = draw(st.sampled_from(["csv", "jsonl", "parquet"]))
    try:
        texts, label = read(tmp_path / "d", {name: columns[name] for name in order}, form)
    except UserError:
        return
    finally:
        for file in (tmp_path / "d").glob("*"):
            file.unlink()
    assert set(texts) <= harmless, (label, columns)


LABELS = [("neg", "pos")[number * number % 7 % 2] for number in range(ROWS)]
SEVERAL: dict[str, tuple[Columns, str]] = {
    "two texts that are no pair": (
        {"text": noise(1), "reason": noise(2), "label": LABELS},
        "could be text or reason, or both",
    ),
    "three texts": ({"a": noise(1), "b": noise(2), "c": noise(3), "label": LABELS}, "could be a, b or c"),
    "a pair with the answer": (
        {"question": noise(1), "answer": derived(LABELS, "words", 0), "label": LABELS},
        "could be question or answer; answer gives the label away: its 2 different texts have one label each",
    ),
    "an answer beside an identifier": (
        {"url": noise(1), "verdict": derived(LABELS, "words", 0), "label": LABELS},
        "could be verdict or url; verdict gives the label away",
    ),
    "two labels": (
        {"text": noise(1), "stars": LABELS, "sentiment": LABELS},
        "task.label=label: could be stars or sentiment",
    ),
    "no text": (
        {"score": [1.5] * ROWS, "label": LABELS},
        "task.columns: cannot be inferred: the data have score, label",
    ),
    "no line of names": ({noise(9)[0] * 9: noise(1), "pos": LABELS}, "no such column: the data have"),
}


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_more_than_one_way_is_refused_with_all_named(tmp_path: Path, case: str, form: str) -> None:
    """The first way would be taken in silence, and the user would believe in another."""
    columns, words = SEVERAL[case]
    with pytest.raises(UserError) as caught:
        read(tmp_path / "d", columns, form)
    assert words in str(caught.value)
    assert all(len(line) < 300 for line in str(caught.value).splitlines())


READ: dict[str, tuple[Columns, list[str]]] = {
    "SetFit's layout": ({"text": noise(1), "label": LABELS, "label_text": derived(LABELS, "words", 0)}, ["text"]),
    "a pair": ({"hypothesis": noise(1), "premise": noise(2), "label": LABELS}, ["premise", "hypothesis"]),
    "a numbered pair": ({"q1": noise(1), "q2": noise(2), "label": LABELS}, ["q1", "q2"]),
    "a pair with its label's name": (
        {"text_a": noise(1), "text_b": noise(2), "label_text": derived(LABELS, "words", 0), "label": LABELS},
        ["text_a", "text_b"],
    ),
    "texts that are numbers": (
        {"text": list(map(str, range(ROWS))), "id": list(range(ROWS)), "label": LABELS},
        ["text"],
    ),
    "numbers beside a text": ({"price": ["3.10"] * ROWS, "review": noise(1), "label": LABELS}, ["review"]),
    "an index of pandas": ({"": list(range(ROWS)), "text": noise(1), "label": LABELS}, ["text"]),
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_one_way_is_taken(tmp_path: Path, case: str, form: str) -> None:
    columns, expected = READ[case]
    assert read(tmp_path / "d", columns, form)[0] == expected


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["text", "label"], "the column 'label' holds the label"),
        (["label"], "the column 'label' holds the label"),
        (["text", "text"], "names the column 'text' twice"),
    ],
)
def test_a_label_is_never_a_text_and_a_text_is_read_once(tmp_path: Path, columns: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        task(tmp_path, columns=columns)


# --- Labels


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["007", "010"], ["007", "010"]),
        (["1", "0"], ["0", "1"]),
        (["1.0", "0.0"], ["0", "1"]),
        (["10", "2"], ["2", "10"]),
        (["True", "False"], ["False", "True"]),
        (["+", "-"], ["+", "-"]),
        (["NA", "null"], ["NA", "null"]),
        (["2020-01-01", "2021-01-01"], ["2020-01-01", "2021-01-01"]),
        (["1e3", "2e3"], ["1e3", "2e3"]),
    ],
)
def test_classes_are_what_the_file_says(tmp_path: Path, values: list[str], expected: list[str]) -> None:
    """Classes 007 and 010 would become 7 and 10, and a list of labels that names them would match nothing."""
    columns: Columns = {"text": noise(1), "label": values * (ROWS // 2)}
    found = task(save(tmp_path / "d", columns, "csv")).resolved()
    assert found.labels == expected
    for split in ("train", "validation"):
        assert set(found.examples(split).labels) == {0, 1}
    if len(values[0]) > 1:
        listed = task(tmp_path / "d", labels=values).resolved()
        assert (listed.examples("train").labels[:2] == [0, 1]).all()


@pytest.mark.parametrize("missing", ["", "-", "-1", "?", "NaN", "n/a", "<NA>", " "])
def test_a_missing_label_is_no_class(tmp_path: Path, missing: str) -> None:
    """SNLI as published writes - where its annotators did not agree, UCI's files ?, and str() of pandas nan."""
    values = [missing, *(["1", "2"] if missing == "-1" else ["yes", "no"]) * 30][:ROWS]
    found = task(save(tmp_path / "d", {"text": noise(1), "label": values}, "csv")).resolved()
    assert missing not in found.labels
    with pytest.raises(UserError, match="1 of 40 rows of split 'train' have no label"):
        found.examples("train")


@pytest.mark.parametrize("form", ["published", "saved", "saved apart"])
def test_rows_that_a_format_defines_as_unlabeled_are_left_out_and_counted(tmp_path: Path, form: str) -> None:
    """SNLI has - where its annotators did not agree, and the hub -1; 785 rows of its training split."""
    if form == "published":
        values = ["-", *["yes", "no"] * 30][:ROWS]
        folder = save(tmp_path / "d", {"text": noise(1), "gold_label": values}, "csv")
    else:
        import datasets

        names = datasets.ClassLabel(names=["no", "yes"])
        features = datasets.Features({"text": datasets.Value("string"), "gold_label": names})
        table = {"text": noise(1), "gold_label": [-1, *[1, 0] * 30][:ROWS]}
        parts = {split: datasets.Dataset.from_dict(table, features) for split in ("train", "validation")}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
        if form == "saved apart":  # each split by itself, without the file of all
            (tmp_path / "d" / "dataset_dict.json").unlink()
        folder = tmp_path / "d"
    found = task(folder, label="gold_label").resolved()
    with recorded_tables() as tables:
        examples = found.examples("train")
    account = found.account("train", examples, tables)
    assert (found.labels, account.unlabeled) == (["no", "yes"], 1)
    assert account.rows == len(examples) == account.rows_read - 1
    assert examples.texts[0][0] == noise(1)[1]
    assert examples.labels[:2].tolist() == [1, 0]
    if form == "published":
        as_class = task(folder, label="gold_label", labels=["-", "no", "yes"]).resolved()
        assert len(as_class.examples("train")) == account.rows_read


def test_a_label_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    """Half of a surrogate pair in a class trained to the end, and failed when the card was written."""
    with pytest.raises(UserError, match="half of a surrogate pair"):
        read(tmp_path / "d", {"text": noise(1), "label": ["a", "b\ud800"] * (ROWS // 2)}, "jsonl", labels=None)


def test_the_remedy_for_a_class_of_one_split_names_those_of_both(tmp_path: Path) -> None:
    """With the classes of the validation split alone, the next command would fail on the training split."""
    columns: Columns = {"text": noise(1), "label": ["yes", "no"] * 20 + ["yes", "perhaps"] * 10}
    found = task(save(tmp_path / "d", columns, "csv")).resolved()
    with pytest.raises(UserError) as caught:
        found.examples("validation")
    assert "'task.labels=[no,yes,perhaps]'" in str(caught.value)
    both = task(tmp_path / "d", labels=["no", "yes", "perhaps"]).resolved()
    assert [set(both.examples(split).labels) for split in ("train", "validation")] == [{0, 1}, {1, 2}]


def test_a_rare_class_is_learned_where_one_file_is_split(tmp_path: Path) -> None:
    rows = [[text, label] for text, label in zip(noise(1), LABELS, strict=True)]
    rows += [[f"rare text {number}", f"rare{number}"] for number in range(6)]
    with (tmp_path / "one.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text", "label"], *rows])
    found = task(tmp_path / "one.csv", split_off=0.2).resolved()
    train, validation = (found.examples(split).labels for split in (found.train, *found.validation.values()))
    assert set(train) == set(range(8))
    assert len(train) + len(validation) == 66
    assert set(validation) <= {0, 1}


# --- Flags


@pytest.mark.parametrize("separator", [None, "comma", "blank"])
def test_flags_are_no_names(tmp_path: Path, separator: str | None) -> None:
    """Lists of 0 and 1, as transformers' BCE loss wants them, would become the labels 0 and 1: F1 100."""
    sign = {"comma": ",", "blank": " ", None: ","}[separator]
    rows = [[1, 0, 0], [0, 1, 1], [0, 0, 0]] * (ROWS // 3)
    values: list[Any] = list(rows) if separator is None else [sign.join(map(str, row)) for row in rows]
    columns: Columns = {"text": noise(1), "labels": values}
    found = task(save(tmp_path / "d", columns, "jsonl"), type="multilabel", separator=separator).resolved()
    assert found.labels == ["0", "1", "2"]
    assert found.examples("train").labels[:3].tolist() == rows[:3]
    named = task(tmp_path / "d", type="multilabel", separator=separator, labels=["x", "y", "z"]).resolved()
    assert named.examples("train").labels[:3].tolist() == rows[:3]
    with pytest.raises(UserError, match="lists of length 3, which are not 2 flags"):
        task(tmp_path / "d", type="multilabel", separator=separator, labels=["x", "y"]).resolved().examples("train")


ITEMS = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=5), min_size=1, max_size=4)
PRINTED: list[Callable[[list[Any]], str]] = [
    repr,
    json.dumps,
    lambda items: str(np.array(items, dtype=object)),
    lambda items: np.array2string(np.array(items, dtype=object), separator=", "),
]


@settings(max_examples=50, deadline=None)
@given(items=ITEMS | st.lists(st.integers(-9, 9), min_size=1), form=st.sampled_from(PRINTED))
def test_printed_lists_are_read_back(items: list[Any], form: Callable[[list[Any]], str]) -> None:
    """numpy prints no commas, and Python joins texts without a comma between them: two labels became one."""
    assert printed_value(form(items)) == items
    assert printed_value(str({"text": form(items)})) == {"text": form(items)}


@pytest.mark.parametrize("text", ["['it''s']", "[1-2]", "[a b]", "[1 2 ... 9]", "(1, 2)", "a [1]", "[" * 10_000 + "]"])
def test_what_is_no_printed_list_is_text(text: str) -> None:
    assert printed_value(text) is None


def test_lists_that_can_be_both_are_refused(tmp_path: Path) -> None:
    columns: Columns = {"text": noise(1), "labels": [[1, 0], [0, 1]] * (ROWS // 2)}
    save(tmp_path / "d", columns, "jsonl")
    with pytest.raises(UserError, match=r"task.flags: .* labels 0 and 1, or a flag for each of two"):
        task(tmp_path / "d", type="multilabel").resolved()
    given: dict[str, Any] = {"type": "multilabel", "columns": ["text"]}
    flags = task(tmp_path / "d", flags=True, labels=["x", "y"], **given).examples("train").labels
    names = task(tmp_path / "d", flags=False, labels=["0", "1"], **given).examples("train").labels
    assert (flags[:2].tolist(), names[:2].tolist()) == ([[1, 0], [0, 1]], [[1, 1], [1, 1]])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 1, 0], [1, 0]], "lists of length 2 and 3"),
        ([[0.3, 0.7], [1.0, 0.0]], "not a list of labels or of their numbers"),
    ],
)
def test_lists_that_are_neither_are_refused(tmp_path: Path, rows: list[list[Any]], words: str) -> None:
    columns: Columns = {"text": noise(1), "labels": rows * (ROWS // 2)}
    with pytest.raises(UserError, match=words):
        task(save(tmp_path / "d", columns, "jsonl"), type="multilabel").resolved()


# --- What gives labels away


def test_what_gives_labels_away_by_hand() -> None:
    labels = ["neg", "pos"] * 20
    assert leak(noise(1, 40), labels) is None
    assert "have one label each" in str(leak(["x", "y"] * 20, labels))
    assert "predict 98 %" in str(leak(["y", *["y", "x"] * 19, "y"], labels))
    assert "the first word" in str(leak([f"{'xy'[n % 2]} {n}" for n in range(40)], labels))
    assert "the last word" in str(leak([f"{n} {'xy'[n % 2]}" for n in range(40)], labels))


def test_pairs() -> None:
    assert as_pair(["sentence2", "sentence1"]) == ["sentence1", "sentence2"]
    assert as_pair(["Question", "Context"]) == ["Question", "Context"]
    assert as_pair(["text", "reason"]) is None
    assert as_pair(["a", "b"]) is None
    assert as_pair(["s1", "t2"]) is None
