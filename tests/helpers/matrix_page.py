"""``docs/matrix.md`` from the outcomes of ``make matrix``: ``python tests/helpers/matrix_page.py <outcomes.csv>``."""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distill_runner.common.terminal import markdown_table

HEAD = Path(__file__).with_suffix(".txt").read_text()


def page(outcomes: Iterable[Sequence[str]]) -> str:
    """A table of methods by students, alike ones together, and the refusals.

    Args:
        outcomes: method, student, way to start it, key of the student that was trained, refusal; one of both is empty.
    """
    told = sorted(set(map(tuple, outcomes)))
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for method, student, _, _, refusal in told:
        found[method][student].add(refusal)
    refusals = list(dict.fromkeys(refusal for *_, refusal in told if refusal))
    number = {"": "trains", **{refusal: str(place) for place, refusal in enumerate(refusals, start=1)}}
    cells = {
        method: {student: ", ".join(sorted(number[one] for one in of)) for student, of in students.items()}
        for method, students in found.items()
    }
    students = next(iter(cells.values()))
    columns = alike({student: tuple(cells[method][student] for method in cells) for student in students})
    rows = alike({method: tuple(of.values()) for method, of in cells.items()})
    body = [[shown(group), *(cells[group[0]][names[0]] for names in columns)] for group in rows]
    lines = [markdown_table(["method", *map(shown, columns)], body, text_columns=len(columns) + 1)]
    firsts = dict[str, str]()
    for one in refusals:
        problem, _, remedy = one.partition("\n")
        first = firsts.setdefault(remedy, number[one])
        advice = " ".join(remedy.split()) if first == number[one] else f"As {first}."
        lines += ["", f"{number[one]}. `{problem}` {advice}"]
    keys = [key for *_, key, refusal in told if not refusal]
    counts = {"cells": len(told), "trained": len(keys), "refused": len(told) - len(keys), "different": len(set(keys))}
    return HEAD.format(**counts) + "\n".join(lines) + "\n"


def shown(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def alike(entries: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """The names, those with the same entry together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, entry in entries.items():
        groups.setdefault(entry, []).append(name)
    return list(groups.values())


if __name__ == "__main__":
    with open(sys.argv[1], newline="") as file:
        print(page(csv.reader(file)), end="")
