"""Pictures of predictions: errors by type, and a page of sentences with their errors in color."""

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.tasks.tokens.entities import BOUNDARY, ERRORS, INVENTED, MISSED, RIGHT, TYPE, TagScores

COLORS = {RIGHT: "#009e73", MISSED: "#999999", TYPE: "#e69f00", BOUNDARY: "#56b4e9", INVENTED: "#d55e00"}
"""Color of each kind of error, from Okabe and Ito's."""
MAX_SENTENCES = 200
STYLE = """body{font:15px/1.9 sans-serif;max-width:60em;margin:2em auto;color:#222}
p{margin:.3em 0} s{text-decoration:none} small{font-size:11px;color:#555}
i,b{font-style:normal;font-weight:normal;padding:1px 3px;border-radius:3px}
i{border-bottom:3px solid} b{color:#fff}"""


def save_errors(file: Path, by_type: Mapping[str, Mapping[str, int]]) -> None:
    """Draw a bar for each type of entity: right, missed, wrong type, wrong boundary; and invented ones beside it."""
    from matplotlib.figure import Figure

    kinds = (RIGHT, BOUNDARY, TYPE, MISSED)
    figure = Figure(figsize=(7.5, 1.4 + 0.45 * max(1, len(by_type))), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(by_type.values()):
        start = 0
        for kind in kinds:
            axes.barh(place, row[kind], left=start, height=0.6, color=COLORS[kind], label=kind if not place else None)
            start += row[kind]
        label = INVENTED if not place else None
        axes.barh(place, -row[INVENTED], height=0.6, color=COLORS[INVENTED], label=label)
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
    gold, predicted = scores.errors
    marks: dict[int, list[tuple[int, int, str, str, str]]] = {}
    for entities, errors, tag in ((scores.gold_entities, gold, "i"), (scores.predicted_entities, predicted, "b")):
        for (begin, end, kind), error in zip(entities.tolist(), errors, strict=True):
            number = int(scores.sentence_of(np.array(begin)))
            first, last = int(split.begins[begin]), int(split.ends[end - 1])
            marks.setdefault(number, []).append((first, last, tag, error, scores.tagset.type_names[kind]))
    wrong = sorted(number for number, of_one in marks.items() if any(mark[3] != RIGHT for mark in of_one))
    lines = [_line(texts[number], marks[number]) for number in wrong[:MAX_SENTENCES]]
    keys = " ".join(f'<b style="background:{COLORS[kind]}">{kind}</b>' for kind in (RIGHT, *ERRORS))
    caption = f"{len(wrong):,} of {len(texts):,} sentences have errors; the first {len(lines):,} are here."
    legend = f"<p>Data: <i>underlined</i>. Predicted: background. {keys}</p><p>{caption}</p>"
    name = html.escape(title)
    head = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    file.write_text(f"{head}<h1>{name}</h1>{legend}<hr>{''.join(lines)}</html>\n", encoding="utf-8")


def _line(text: str, marks: Sequence[tuple[int, int, str, str, str]]) -> str:
    """Return a paragraph with the text, in pieces between the bounds of entities."""
    cuts = sorted({0, len(text), *(bound for mark in marks for bound in mark[:2])})
    parts = []
    for first, last in pairwise(cuts):
        content = html.escape(text[first:last])
        for begin, end, tag, error, kind in marks:
            if begin <= first and last <= end:
                style = "border-color" if tag == "i" else "background"
                content = (
                    f'<{tag} style="{style}:{COLORS[error]}" title="{html.escape(kind)}: {error}">{content}</{tag}>'
                )
        ending = [(tag, kind) for _, end, tag, _, kind in marks if end == last]
        notes = ", ".join(f"{'data' if tag == 'i' else 'predicted'} {html.escape(kind)}" for tag, kind in ending)
        parts.append(content + (f" <small>{notes}</small>" if notes else ""))
    return f"<p>{''.join(parts)}</p>\n"
