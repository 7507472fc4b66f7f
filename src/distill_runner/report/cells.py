"""A cell of a table: the points of one method's grid on one task, each with its seeds.

A result's scores lie in 0..1; here and in all that is printed they are percentages, as in the papers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan
from statistics import fmean
from typing import Any

from distill_runner.report.collect import Result
from distill_runner.report.statistics import Spread

Settings = Mapping[str, Any]
"""Of a run, by dotted name: the ``settings`` of its result."""
STAGES, DATA = "stages", ("share", "transfer", "transfer_size", "route")
"""Settings that are not the student's own hyper-parameters; those of the stages that are listed are neither."""
GRID, GRID_MEAN, ELSEWHERE = "best of grid", "best mean of grid", "chosen by {}"
"""How a grid's point was picked: by the scores that stand there, or by others of the same runs."""


def label(result: Result) -> str:
    """Method with its mapping and, unless it is the plain dot product, its attention: ``alp po kqv-4``."""
    attention, heads = result.get("attention"), result.get("heads")
    shown = None if attention == "dot" else f"{attention}-{heads}" if attention and heads else attention
    return " ".join(part for part in (result["method"], result.get("mapping"), shown) if part)


def is_scored(result: Result) -> bool:
    """Whether it is of a student that has been trained to the end; a run may also end with another stage."""
    return result["status"] == "done" and "score" in result


def selection_of(result: Result) -> Mapping[str, Any]:
    """``on`` what its epoch was selected, and the ``score`` there, if that is not the score that it reports."""
    return result.get("selection") or {}


def settings(result: Result) -> Settings:
    """The hyper-parameters of a run by dotted name; none of one that could not be read."""
    return result.get("settings") or {}


def varied(every: Sequence[Settings]) -> list[str]:
    """The names in which settings differ, without those in which a stage goes with the student everywhere."""
    names = dict.fromkeys(name for each in every for name in each)
    differ = [name for name in names if len({json.dumps(each.get(name)) for each in every}) > 1]
    return [name for name in differ if any(each.get(name) != each.get(name.partition(".")[2]) for each in every)]


def telling_rows(every: Sequence[Settings]) -> list[str]:
    """Of what differs between runs of one method on one task, the names that are not the student's own."""
    stages = {stage for each in every for stage in each.get(STAGES, [])}
    return [name for name in varied(every) if name.partition(".")[0] in {STAGES, *DATA, *stages}]


@dataclass(frozen=True)
class SettingScores:
    """Finished runs of one setting, which differ by their seed alone; ``spread`` is of their scores."""

    runs: tuple[Result, ...]

    @cached_property
    def spread(self) -> Spread:
        return Spread.of([100 * run["score"] for run in self.runs])

    @property
    def selection(self) -> float:
        """What grids choose by: the mean of these scores, or of those on held-out examples, or by another metric."""
        return fmean(100 * selection_of(run).get("score", run["score"]) for run in self.runs)


@dataclass(frozen=True)
class ResultCell:
    """A method on a task: the points of its grid that have finished, and the runs that have not."""

    points: tuple[SettingScores, ...]
    unfinished: tuple[Result, ...] = ()

    @cached_property
    def best(self) -> list[SettingScores]:
        """The points with the best mean, among those with the most seeds: few seeds are lucky more easily."""
        seeds = max((point.spread.count for point in self.points), default=0)
        candidates = [point for point in self.points if point.spread.count == seeds]
        means = [-inf if isnan(point.selection) else point.selection for point in candidates]
        return [point for point, mean in zip(candidates, means, strict=True) if mean == max(means)]

    @property
    def chosen(self) -> SettingScores | None:
        """The first of the best."""
        return self.best[0] if self.best else None

    @property
    def kind(self) -> str:
        """What the value is: nothing for a run or the mean of its seeds, else how it was picked."""
        if self.chosen is None or len(self.points) == 1:
            return ""
        if on := selection_of(self.chosen.runs[0]).get("on"):
            return ELSEWHERE.format(on)
        return GRID_MEAN if self.chosen.spread.count > 1 else GRID

    @property
    def value(self) -> float | None:
        return self.chosen.spread.mean if self.chosen else None

    @property
    def metric(self) -> str | None:
        return self.chosen.runs[0]["metric"] if self.chosen else None

    @property
    def best_run(self) -> float | None:
        """The best single run of all points and seeds."""
        return max((100 * run["score"] for point in self.points for run in point.runs), default=None)

    @property
    def grid_mean(self) -> float | None:
        """The mean of the points' means, where there is more than one: what a point gives without a search."""
        return fmean(point.spread.mean for point in self.points) if len(self.points) > 1 else None

    @property
    def published(self) -> Mapping[str, Any] | None:
        """The number that a paper prints: ``value``, ``source``, ``comparable``."""
        return self.chosen.runs[0].get("published") if self.chosen else None

    @property
    def difference(self) -> float | None:
        return self.value - self.published["value"] if self.published and self.value is not None else None

    @property
    def status(self) -> str:
        """``done``, or why there is no value."""
        if self.points:
            return "done"
        statuses = [run["status"] for run in self.unfinished]
        return "running" if "running" in statuses else (statuses or ["not run"])[-1]

    @cached_property
    def chosen_settings(self) -> dict[str, Any]:
        """Of the chosen point, the settings in which the grid's points differ."""
        if self.chosen is None:
            return {}
        every = [settings(point.runs[0]) for point in self.points]
        return {name: settings(self.chosen.runs[0]).get(name) for name in varied(every)}


def cell_of(runs: Sequence[Result]) -> ResultCell:
    """The cell that these runs of one method on one task make."""
    groups: dict[str, list[Result]] = {}
    for run in runs:
        if is_scored(run):
            groups.setdefault(json.dumps(settings(run), sort_keys=True, default=str), []).append(run)
    points: list[SettingScores] = []
    for group in groups.values():
        # A seed that comes twice: such runs differ in something that is not recorded, and have no mean.
        repeated = len({run["seed"] for run in group}) < len(group)
        points += [SettingScores((run,)) for run in group] if repeated else [SettingScores(tuple(group))]
    return ResultCell(tuple(points), tuple(run for run in runs if not is_scored(run)))
