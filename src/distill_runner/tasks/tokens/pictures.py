"""Pictures of predictions: errors by type, and a page of sentences with their errors in color."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.tasks.tokens.tags import BOUNDARY, ERRORS, INVENTED, MISSED, RIGHT, TYPE, TagScores

COLORS = {RIGHT: "#009e73", BOUNDARY: "#56b4e9", TYPE: "#e69f00", MISSED: "#999999", INVENTED: "#d55e00"}
"""Color of each kind of error, from Okabe and Ito's."""
MAX_SENTENCES = 200
STYLE = """body{font:15px/1.9 sans-serif;max-width:60em;margin:2em auto;color:#222}
p{margin:.3em 0} s{text-decoration:none} small{font-size:11px;color:#555}
i,b{font-style:normal;font-weight:normal;padding:1px 3px;border-radius:3px}
i{border-bottom:3px solid} b{color:#fff}"""
Mark = tuple[int, int, str, str, str]
"""First character of an entity, the one after its last, HTML element, kind of error and type."""


def save_errors(file: Path, by_type: Mapping[str, Mapping[str, int]]) -> None:
    """Draw a bar for each type of entity: right, wrong boundary, wrong type, missed; and invented ones beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.4 + 0.45 * max(1, len(by_type))), layout="constrained")
    axes = figure.subplots()
    ends = np.zeros(len(by_type))
    for kind, color in COLORS.items():
        counts = np.array([row[kind] for row in by_type.values()])
        sizes, starts = (-counts, None) if kind == INVENTED else (counts, ends.copy())
        axes.barh(range(len(by_type)), sizes, left=starts, height=0.6, color=color, label=kind)
        ends += counts
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(by_type)), list(by_type))
    axes.set_ylim(len(by_type) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_xlabel("invented entities to the left, entities of the data to the right")
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def save_error_page(file: Path, title: str, texts: Sequence[str], split: Any, scores: TagScores) -> None:
    """Write a page of the first sentences with errors.

    Entities of the data are underlined, predicted ones have a background; colors show what became of them.

    Args:
        texts: the texts of the split's sentences.
    """
    marks: dict[int, list[Mark]] = {}
    sides = (scores.gold_entities, scores.predicted_entities)
    for entities, errors, element in zip(sides, scores.errors, "ib", strict=True):
        for (begin, end, kind), error in zip(entities.tolist(), errors, strict=True):
            place = int(split.begins[begin]), int(split.ends[end - 1])
            number = int(scores.sentence_of(begin))
            marks.setdefault(number, []).append((*place, element, error, scores.tagset.type_names[kind]))
    wrong = sorted(number for number, of_one in marks.items() if any(mark[3] != RIGHT for mark in of_one))
    lines = "".join(_paragraph(texts[number], marks[number]) for number in wrong[:MAX_SENTENCES])
    keys = " ".join(f'<b style="background:{COLORS[kind]}">{kind}</b>' for kind in (RIGHT, *ERRORS))
    count = min(len(wrong), MAX_SENTENCES)
    caption = f"{len(wrong):,} of {len(texts):,} sentences have errors; the first {count:,} are here."
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    legend = f"<p>Data: <i>underlined</i>. Predicted: background. {keys}</p><p>{caption}</p>"
    file.write_text(f"{head}<h1>{escape(title)}</h1>{legend}<hr>{lines}</html>\n", encoding="utf-8")


def _paragraph(text: str, marks: Sequence[Mark]) -> str:
    """Return a paragraph with the text, in pieces between the bounds of entities."""
    parts = []
    for first, last in pairwise(sorted({0, len(text), *(bound for mark in marks for bound in mark[:2])})):
        content, notes = escape(text[first:last]), []
        for begin, end, element, error, kind in marks:
            if begin <= first and last <= end:
                style = f"{'border-color' if element == 'i' else 'background'}:{COLORS[error]}"
                content = f'<{element} style="{style}" title="{escape(kind)}: {error}">{content}</{element}>'
            if end == last:
                notes.append(f"{'data' if element == 'i' else 'predicted'} {escape(kind)}")
        parts.append(content + (f" <small>{', '.join(notes)}</small>" if notes else ""))
    return f"<p>{''.join(parts)}</p>\n"
