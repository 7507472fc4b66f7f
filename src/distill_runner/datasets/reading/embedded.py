"""Columns of the embedded data sets, named as in the public data sets that they resemble."""

from typing import Any

from distill_runner.datasets.reading.dataset import EMBEDDED, Dataset
from distill_runner.datasets.reading.folders import missing_split
from distill_runner.datasets.reading.split_table import SplitTable, check_columns


def read_embedded(data: Dataset, split: str) -> SplitTable:
    """Return the columns of an embedded data set.

    The demo tasks have the column names of GLUE: ``sentence``, or ``sentence1`` and ``sentence2``, and ``label``.
    """
    from distill_runner.datasets import embedded

    name = data.dataset.removeprefix(EMBEDDED)
    other = {"text": _embedded_text, "digits": _embedded_digits, "questions": _embedded_questions}
    if name in other:
        return other[name](data, split)
    splits = embedded.demo_task(name)
    if split not in splits:
        raise missing_split(data, split, list(splits), data.dataset)
    texts, labels = splits[split].texts, splits[split].labels
    columns: dict[str, list[Any]] = (
        {"sentence": texts[0]} if len(texts) == 1 else {"sentence1": texts[0], "sentence2": texts[1]}
    )
    columns["label"] = [] if labels is None else labels.tolist()
    check_columns(data, split, list(columns))
    return SplitTable(columns, embedded.PAIR_LABELS if name == "pairs" else embedded.SENTENCE_LABELS)


def _embedded_text(data: Dataset, split: str) -> SplitTable:
    """Return passages in the column ``text`` and the names of their topics in ``topic``."""
    from distill_runner.datasets.embedded import SPLITS, embedded_passages, topic_split

    if split not in SPLITS:
        raise missing_split(data, split, list(SPLITS), data.dataset)
    topics = {topic: texts for topic, texts in embedded_passages().items() if topic_split(topic) == split}
    columns = {
        "text": [text for texts in topics.values() for text in texts],
        "topic": [topic for topic, texts in topics.items() for _ in texts],
    }
    check_columns(data, split, list(columns))
    return SplitTable(columns, None)


def _embedded_digits(data: Dataset, split: str) -> SplitTable:
    """Return grey images of 8 x 8 pixels in the column ``image`` and their digits in ``label``."""
    from distill_runner.datasets.images.digits import as_png

    splits = as_png()
    if split not in splits:
        raise missing_split(data, split, list(splits), data.dataset)
    images, labels = splits[split]
    columns: dict[str, list[Any]] = {"image": images, "label": labels}
    check_columns(data, split, list(columns))
    return SplitTable(columns, [str(digit) for digit in range(10)])


def _embedded_questions(data: Dataset, split: str) -> SplitTable:
    """Return questions in SQuAD's columns."""
    from distill_runner.datasets.embedded import SPLITS
    from distill_runner.datasets.embedded_questions import question_rows

    if split not in SPLITS:
        raise missing_split(data, split, list(SPLITS), data.dataset)
    rows = question_rows(split)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    check_columns(data, split, list(columns))
    return SplitTable(columns, None)
