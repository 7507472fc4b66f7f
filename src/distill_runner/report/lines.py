"""Lines of a table, shared by all formats: values, spreads, statistics of the grid, and published numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from distill_runner.common.errors import as_typed
from distill_runner.datasets.metrics import METRICS
from distill_runner.report.cells import GRID, GRID_MEAN, ResultCell
from distill_runner.report.rows import ResultTable, Row, Teacher, beside

AVERAGE, PHASES = "average", "steps, phases included"
BRACKETS = "In brackets: the paper's teacher, size or metric differs from the run's."


@dataclass(frozen=True)
class Line:
    """A line of the table, with its cells by task.

    Attributes:
        belongs: whether the line gives details of the nearest line above it with ``belongs=False``.
        values: numbers by task, formatted by ``form``.
        words: text by task, shown where there is no number.
        bracketed: tasks whose number is shown in brackets, because the published number is not comparable.
        averaged: whether a mean over the tasks is meaningful.
    """

    name: str
    values: Mapping[str, float]
    belongs: bool = True
    form: str = "{:.2f}"
    words: Mapping[str, str] = field(default_factory=dict)
    bracketed: frozenset[str] = frozenset()
    averaged: bool = True

    def text(self, task: str) -> str:
        if task not in self.values:
            return self.words.get(task, "-")
        text = self.form.format(self.values[task])
        return f"({text})" if task in self.bracketed else text

    def with_average(self, tasks: Sequence[str]) -> "Line":
        """Add the mean over ``tasks``, if the line has a number for each of them."""
        if not self.averaged or any(task not in self.values for task in tasks):
            return self
        values = {**self.values, AVERAGE: fmean(self.values[task] for task in tasks)}
        return replace(self, values=values, bracketed=self.bracketed | ({AVERAGE} if self.bracketed else set()))


Number = Callable[[ResultCell], float | None]


def _spread(name: str) -> Number:
    return lambda cell: getattr(cell.chosen.spread, name) if cell.chosen else None


BENEATH: tuple[tuple[str, Number, str, bool], ...] = (
    ("sd over seeds", _spread("sd"), "{:.2f}", False),
    ("95 % interval", _spread("interval"), "±{:.2f}", False),
    ("seeds", _spread("count"), "{:.0f}", False),
    (PHASES, lambda cell: cell.steps_in_all, "{:.0f}", False),
    ("best single run", lambda cell: cell.best_run if cell.kind == GRID_MEAN else None, "{:.2f}", True),
    ("mean of grid", lambda cell: cell.grid_mean, "{:.2f}", True),
    ("points of grid", lambda cell: len(cell.points), "{:.0f}", False),
)
"""Lines beneath a value: name, number, format, and whether the line is averaged over the tasks.

``PHASES`` is only in tables whose rows differ in the steps of earlier phases.
"""


def lines(table: ResultTable) -> tuple[list[str], list[Line]]:
    """Return the columns and the lines of a table, teachers first. Two tasks or more also get a column of averages."""
    every = [line for teacher in table.teachers for line in _teacher_lines(teacher)]
    before = {cell.steps_before for row in table.rows for cell in row.cells.values()}
    every += [line for row in table.rows for line in _row_lines(row) if len(before) > 1 or line.name != PHASES]
    if len(averaged := _averaged(table.tasks)) < 2:
        return table.tasks, every
    return [*table.tasks, AVERAGE], [line.with_average(averaged) for line in every]


def _averaged(columns: Sequence[str]) -> list[str]:
    """Return one column per task, without columns of a task for other metrics or for held-out selection."""
    repeated = {name for task in columns for name in (beside(task), *(f"{task} {metric}" for metric in METRICS))}
    return [column for column in columns if column not in repeated]


def notes(table: ResultTable) -> list[str]:
    """Return the notes that readers of the numbers need, one sentence each."""
    bracketed = any(line.bracketed for line in lines(table)[1])
    kinds = {kind for row in table.rows for kind in row.kinds}
    told = [BRACKETS] if bracketed else []
    if kinds & {GRID, GRID_MEAN}:
        told.append("The best of a grid was chosen by these scores: expect a lower score on other data.")
    return told


def chosen(table: ResultTable) -> list[tuple[str, str, str]]:
    """Return row, task and chosen hyper-parameters of each grid, limited to hyper-parameters that vary in the grid."""
    return [
        (row.name, task, chosen_settings(cell))
        for row in table.rows
        for task, cell in row.cells.items()
        if cell.chosen_settings
    ]


def chosen_settings(cell: ResultCell) -> str:
    """Return the hyper-parameters of a grid's best point, and the number of other points with an equal score."""
    told = ", ".join(f"{name} {as_typed(value)}" for name, value in cell.chosen_settings.items())
    return f"{told} ({len(cell.best) - 1} more with the same score)" if len(cell.best) > 1 else told


def reasons(table: ResultTable) -> list[str]:
    """Return why runs have not finished; runs with the same row, task, status and cause share a line."""
    groups: dict[tuple[str, str, str, str], list[object]] = {}
    for name, run in table.unfinished:
        cause = str(run.get("error") or "").partition("\n")[0]
        if not cause and run["status"] in ("interrupted", "paused", "killed"):
            cause = "repeat the command to resume"
        groups.setdefault((name, run["task"], run["status"], cause), []).append(run["seed"])
    told = []
    for (name, task, status, cause), seeds in groups.items():
        which = f", seed {seeds[0]} {status}" if len(seeds) == 1 else f": {len(seeds)} runs {status}"
        told.append(f"{name} on {task}{which}" + (f": {cause}" if cause else ""))
    return told


def _teacher_lines(teacher: Teacher) -> list[Line]:
    first = Line(teacher.name, teacher.scores, belongs=False)
    differences = {task: teacher.scores[task] - number["value"] for task, number in teacher.published.items()}
    return [first, *_published_lines(teacher.published, differences)]


def _row_lines(row: Row) -> list[Line]:
    """Return a row's lines, separate for each kind of value, so that the best of a grid is never beside a mean."""
    waiting = {task: cell.status for task, cell in row.cells.items() if not cell.points}
    kinds = [kind for kind in row.kinds if any(cell.points for cell in row.cells.values() if cell.kind == kind)]
    every: list[Line] = []
    for number, kind in enumerate(kinds or [""]):
        cells = {task: cell for task, cell in row.cells.items() if cell.kind == kind}
        values = _numbers(cells, lambda cell: cell.value)
        name = f"{row.name}, {kind}" if kind else row.name
        every.append(Line(name, values, belongs=False, words={} if number else waiting))
        for beneath, of_cell, form, averaged in BENEATH:
            line = Line(beneath, _numbers(cells, of_cell), form=form, averaged=averaged)
            if any(line.text(task) not in ("0", "1") for task in line.values):
                every.append(line)
        if found := _optimism(row, cells):
            every.append(Line("optimism", found, form="{:+.2f}", averaged=False))
        printed = {task: cell.published for task, cell in cells.items() if cell.published}
        every += _published_lines(printed, _numbers(cells, lambda cell: cell.difference))
    return every


def _optimism(row: Row, cells: Mapping[str, ResultCell]) -> dict[str, float]:
    """Return, by task, the score under selection on the reported examples minus that under held-out selection."""
    pairs = ((task, cell.value, row.cells.get(beside(task))) for task, cell in cells.items())
    return {
        task: value - held.value
        for task, value, held in pairs
        if value is not None and held is not None and held.value is not None
    }


def _numbers(cells: Mapping[str, ResultCell], of_cell: Number) -> dict[str, float]:
    found = {task: of_cell(cell) for task, cell in cells.items() if cell.points}
    return {task: value for task, value in found.items() if value is not None}


def _published_lines(printed: Mapping[str, Mapping[str, object]], differences: Mapping[str, float]) -> list[Line]:
    """Return two lines per source: its published numbers, and the differences of the run's scores from them."""
    every = []
    for source in dict.fromkeys(str(number["source"]) for number in printed.values()):
        here = {task: number for task, number in printed.items() if number["source"] == source}
        bracketed = frozenset(task for task, number in here.items() if not number["comparable"])
        every.append(Line(source, {task: float(number["value"]) for task, number in here.items()}, bracketed=bracketed))  # type: ignore[arg-type]
        every.append(
            Line("difference", {task: differences[task] for task in here}, form="{:+.2f}", bracketed=bracketed)
        )
    return every
