"""Predicted entities as JSON lines, and predicted tags as a CoNLL file."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from distill_runner.tasks.tokens.data import Sentence
from distill_runner.tasks.tokens.entities import first_words
from distill_runner.tasks.tokens.schemes import TagSet

CONLL_SUFFIXES = (".conll", ".bio", ".iob")
"""Names of files that get a word and its tag in each line instead of JSON lines."""
PredictedSpan = dict[str, Any]
"""An entity: ``start`` and ``end`` in characters, ``label``, and ``probability``, the mean of its words'."""


def predicted_spans(split: Any, tags: np.ndarray, probability: np.ndarray, tagset: TagSet) -> list[list[PredictedSpan]]:
    """Return the entities of each sentence.

    Args:
        split: the words of the sentences, with their characters.
        tags: (N,), predicted tag of each word.
        probability: (N,), of these tags.
    """
    sentences = np.asarray(split.sentences)
    spans: list[list[PredictedSpan]] = [[] for _ in range(split.num_examples)]
    for begin, end, kind in tagset.entities(tags, first_words(sentences)).tolist():
        number = int(np.searchsorted(sentences, begin, side="right")) - 1
        spans[number].append(
            {
                "start": int(split.begins[begin]),
                "end": int(split.ends[end - 1]),
                "label": tagset.type_names[kind],
                "probability": round(float(probability[begin:end].mean()), 6),
            }
        )
    return spans


def json_lines(sentences: Iterable[Sentence], spans: Iterable[Sequence[PredictedSpan]]) -> str:
    """Return a line for each sentence, with its ``text`` and its ``spans``, which hold their ``text`` too."""
    lines = []
    for sentence, of_sentence in zip(sentences, spans, strict=True):
        of_text = [{**span, "text": sentence.text[span["start"] : span["end"]]} for span in of_sentence]
        lines.append(json.dumps({"text": sentence.text, "spans": of_text}, ensure_ascii=False) + "\n")
    return "".join(lines)


def conll(sentences: Iterable[Sentence], split: Any, tags: np.ndarray, names: Sequence[str]) -> str:
    """Return words with the names of their tags, one in a line; a blank line ends a sentence.

    The format has no sentences without words: they are left out.
    """
    blocks = []
    for number, sentence in enumerate(sentences):
        words = range(*split.words(number).indices(len(tags)))
        if not words:
            continue
        texts = (sentence.text[int(split.begins[word]) : int(split.ends[word])] for word in words)
        lines = (f"{text or '_'}\t{names[tags[word]]}\n" for text, word in zip(texts, words, strict=True))
        blocks.append("".join(lines) + "\n")
    return "".join(blocks)
