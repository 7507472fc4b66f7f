"""``docs/matrix.md`` of the outcomes that ``make matrix`` leaves: ``python tests/matrix_page.py <outcomes.csv>``."""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping

HEAD = """\
# Which students a method trains

Every method with every student and every way to start it (`student.init.layers`): {cells} cells. Of these {trained}
train and {refused} are refused before anything is trained. `make matrix` trains each for two steps on a small task and
writes this page.
Teachers of texts have a width of 32 there; those of images are ResNets. A number stands for a refusal below the table.

"""


def page(outcomes: Iterable[tuple[str, str, str, str]]) -> str:
    """A table of methods by students, alike ones together, and the refusals.

    Args:
        outcomes: method, student, way to start it, refusal; an empty one trains.
    """
    told = sorted(set(outcomes))
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for method, student, _, refusal in told:
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
    lines = [f"| method | {' | '.join(map(shown, columns))} |", "| --- |" + " --- |" * len(columns)]
    for group in rows:
        lines.append(f"| {shown(group)} | {' | '.join(cells[group[0]][names[0]] for names in columns)} |")
    for one in refusals:
        problem, _, remedy = one.partition("\n")
        lines += ["", f"{number[one]}. `{problem}` {' '.join(remedy.split())}"]
    trained = sum(not refusal for *_, refusal in told)
    return HEAD.format(cells=len(told), trained=trained, refused=len(told) - trained) + "\n".join(lines) + "\n"


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
        print(page((method, student, init, refusal) for method, student, init, refusal in csv.reader(file)), end="")
