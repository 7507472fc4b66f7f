"""A table cell: the points of one method's grid on one task, each point with its seeds.

A result holds scores as fractions. Here and in all printed output, scores are percentages, as in the papers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan
from statistics import fmean
from typing import Any

from distill_runner.report.collect import Result
from distill_runner.report.statistics import Spread

Settings = Mapping[str, Any]
"""Settings of a run by dotted name: the ``settings`` of its result."""
STAGES = "stages"
DATA = ("share", "transfer", "transfer_size", "route", "views", "teacher_outputs", "architecture", "tokenizer")
"""Settings that are not the student's own hyper-parameters: data and model. Those of the stages in ``stages`` are not
either."""
GRID, GRID_MEAN, ELSEWHERE = "best of grid", "best mean of grid", "chosen by {}"
"""How the point of a grid was chosen: by the scores that the table shows, or by other scores of the same runs."""


def label(result: Result) -> str:
    """Return the method with its mapping and, unless it is the plain dot product, its attention: ``alp po kqv-4``."""
    attention, heads = result.get("attention"), result.get("heads")
    shown = None if attention == "dot" else f"{attention}-{heads}" if attention and heads else attention
    return " ".join(part for part in (result["method"], result.get("mapping"), shown) if part)


def stage_of(source: str | None) -> str | None:
    """Return the name of the stage whose model ``source`` names; None if it names no stage."""
    name = (source or "").removeprefix("stage:")
    return name if name != (source or "") else None


def is_scored(result: Result) -> bool:
    """Whether the result is of a student that was trained to the end; a run may also end with another stage."""
    return result["status"] == "done" and "score" in result


def selection_of(result: Result) -> Mapping[str, Any]:
    """Return the data or metric (``on``) and the ``score`` that selected the epoch; empty if the reported score did."""
    return result.get("selection") or {}


def settings(result: Result) -> Settings:
    """Return the settings of a run by dotted name; empty if they could not be read."""
    return result.get("settings") or {}


def data_of(result: Result) -> Mapping[str, Any]:
    """Return the data that trained, selected and scored a student (``Splits.used``); empty if they are not known."""
    return result.get("data") or {}


def scored_on(result: Result) -> list[str]:
    """Return the validation splits whose mean is the score: one, unless ``mean`` selects. Empty if not known."""
    return [result["split"]] if "split" in result else data_of(result).get("scored_on", [])


def varied(every: Sequence[Settings]) -> list[str]:
    """Return the names of settings that differ, without settings of a stage that equal the student's in every run."""
    names = dict.fromkeys(name for each in every for name in each)
    differ = [name for name in names if len({json.dumps(each.get(name)) for each in every}) > 1]
    return [name for name in differ if any(each.get(name) != each.get(name.partition(".")[2]) for each in every)]


def telling_rows(every: Sequence[Settings]) -> list[str]:
    """Return the names of differing settings that make separate rows, because they are not the student's own.

    Args:
        every: settings of the runs of one method on one task.
    """
    stages = {stage for each in every for stage in each.get(STAGES, [])}
    return [name for name in varied(every) if name.partition(".")[0] in {STAGES, *DATA, *stages}]


@dataclass(frozen=True)
class SettingScores:
    """Finished runs with equal settings and different seeds; ``spread`` describes their scores in percent."""

    runs: tuple[Result, ...]

    @cached_property
    def spread(self) -> Spread:
        return Spread.of([100 * run["score"] for run in self.runs])

    @property
    def selection(self) -> float:
        """Mean score by which grids choose: the reported score, or one on held-out examples or by another metric."""
        return fmean(100 * selection_of(run).get("score", run["score"]) for run in self.runs)


@dataclass(frozen=True)
class ResultCell:
    """One method on one task: the finished points of its grid, and the runs that have not finished."""

    points: tuple[SettingScores, ...]
    unfinished: tuple[Result, ...] = ()

    @cached_property
    def best(self) -> list[SettingScores]:
        """Points with the best mean among the points with the most seeds; a mean over few seeds is more often lucky."""
        seeds = max((point.spread.count for point in self.points), default=0)
        candidates = [point for point in self.points if point.spread.count == seeds]
        means = [-inf if isnan(point.selection) else point.selection for point in candidates]
        return [point for point, mean in zip(candidates, means, strict=True) if mean == max(means)]

    @property
    def chosen(self) -> SettingScores | None:
        """First of the best points; None if no run has finished."""
        return self.best[0] if self.best else None

    @property
    def kind(self) -> str:
        """How the value was chosen from a grid; empty for a single run or the mean of its seeds."""
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
        """Score of the best single run over all points and seeds, in percent."""
        return max((100 * run["score"] for point in self.points for run in point.runs), default=None)

    @property
    def grid_mean(self) -> float | None:
        """Mean of the points' means: the score to expect without a search. None if there are fewer than two points."""
        return fmean(point.spread.mean for point in self.points) if len(self.points) > 1 else None

    @property
    def steps_in_all(self) -> int | None:
        """Steps that trained the chosen student, those of its earlier phases included; None if they are not known."""
        return self.chosen.runs[0].get("steps_in_all") if self.chosen else None

    @property
    def steps_before(self) -> int:
        """Steps of the chosen student's earlier phases, as far as they are known."""
        return self.steps_in_all - self.chosen.runs[0]["steps"] if self.chosen and self.steps_in_all else 0

    @property
    def published(self) -> Mapping[str, Any] | None:
        """Number that a paper prints for the chosen point: ``value``, ``source``, ``comparable``."""
        return self.chosen.runs[0].get("published") if self.chosen else None

    @property
    def difference(self) -> float | None:
        return self.value - self.published["value"] if self.published and self.value is not None else None

    @property
    def status(self) -> str:
        """``done``, or the reason why there is no value."""
        if self.points:
            return "done"
        statuses = [run["status"] for run in self.unfinished]
        return "running" if "running" in statuses else (statuses or ["not run"])[-1]

    @cached_property
    def chosen_settings(self) -> dict[str, Any]:
        """Settings of the chosen point in which the grid's points differ."""
        if self.chosen is None:
            return {}
        every = [settings(point.runs[0]) for point in self.points]
        return {name: settings(self.chosen.runs[0]).get(name) for name in varied(every)}


def cell_of(runs: Sequence[Result]) -> ResultCell:
    """Return the cell of the runs of one method on one task."""
    points = by_setting([run for run in runs if is_scored(run)])
    return ResultCell(
        tuple(SettingScores(tuple(group)) for group in points), tuple(run for run in runs if not is_scored(run))
    )


def by_setting(runs: Iterable[Result]) -> list[list[Result]]:
    """Group the runs of a cell by their settings. Runs of one group differ only in their seed."""
    groups: dict[str, list[Result]] = {}
    for run in runs:
        groups.setdefault(json.dumps(settings(run), sort_keys=True, default=str), []).append(run)
    found: list[list[Result]] = []
    for group in groups.values():
        # If a seed occurs twice, the runs differ in something that is not recorded, so they are not averaged.
        repeated = len({run["seed"] for run in group}) < len(group)
        found += [[run] for run in group] if repeated else [group]
    return found
