"""Points of a grid: every combination of its values, except those that are dropped or merged with an equal point."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.config import RunConfig
from distill_runner.compose.explain import in_words
from distill_runner.compose.hydra_private import combinations
from distill_runner.pipeline import status
from distill_runner.pipeline.stages import Stage
from distill_runner.report.result import described_by
from distill_runner.sweeping.alike import Alike, Known
from distill_runner.sweeping.composing import Composed, Composer
from distill_runner.sweeping.conditions import holds

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
POINTS_BETWEEN_SEARCHES = 200


@dataclass(frozen=True, eq=False)
class GridPoint:
    """One combination of the grid's values.

    Attributes:
        overrides: overrides of the sweep's configuration that define the point.
        folder: folder of the point's run.
        key: key of the point's artifact in the store; the name of the folder if the point cannot run.
        described: names of the point, such as task, method and seed, as in its result.
        run, stage: typed configuration and resolved stage; None if the point cannot run.
        error: error that keeps the point from running; None if it can run.
    """

    overrides: tuple[str, ...]
    folder: Path
    key: str
    described: Mapping[str, Any]
    run: RunConfig | None = None
    stage: Stage | None = None
    error: Exception | None = None

    @property
    def names(self) -> Mapping[str, Any]:
        """Names of the point, including its key."""
        return {"key": self.key, **self.described}

    def result(self) -> Mapping[str, Any]:
        """Return the result of the point's run, or its names with a status if the run has no result."""
        found = status.read(self.folder) or {"status": "not run"}
        if found.get("key", self.key) != self.key:  # a run on other data, or of an earlier version
            found = {"status": "not run"}
        return {**self.names, "folder": str(self.folder), **found}

    def fail(self, error: str) -> None:
        """Record in the folder that the point failed because of ``error``."""
        status.write(self.folder, "failed", self.names, error)


@dataclass
class Grid:
    """Points that the arguments of a sweep expand to.

    Attributes:
        point: function that makes a point from its overrides.
        points: distinct points that meet all conditions, including points that cannot run.
        dropped: overrides of the points that ``sweep.where`` excludes.
        merged: pairs of a point and the earlier point with the same key, which replaces it.
    """

    point: Callable[[Sequence[str]], GridPoint]
    points: list[GridPoint] = field(default_factory=list)
    dropped: list[tuple[str, ...]] = field(default_factory=list)
    merged: list[tuple[GridPoint, GridPoint]] = field(default_factory=list)


def expand(master: DictConfig, loader: ConfigLoader, arguments: Sequence[str], where: Sequence[str]) -> Grid:
    """Return every combination of the values in ``arguments``; the last argument varies fastest.

    Args:
        master: configuration of the sweep itself.
        where: conditions that a point must meet.
    Raises:
        UserError, HydraException: ``arguments`` or ``where`` cannot be read.
    """
    parser = OverridesParser.create(config_loader=loader)
    every = combinations(parser.parse_overrides(list(arguments)))
    constant = set(every[0]).intersection(*every) if every else set()
    compose = Composer(master, loader, parser, constant)
    alike = Alike()
    grid, first = Grid(lambda overrides: _point(overrides, compose(overrides), alike)), dict[str, GridPoint]()
    for overrides in _watched(list(dict.fromkeys(map(tuple, every)))):  # a repeated value counts once
        composed = compose(overrides)
        if not all(holds(condition, composed.config) for condition in where):
            grid.dropped.append(overrides)
            continue
        point = _point(overrides, composed, alike)
        if point.key in first:
            grid.merged.append((point, first[point.key]))
        else:
            first[point.key] = point
            grid.points.append(point)
    return grid


def _watched(combinations: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield ``combinations``, with a log line every few seconds.

    Garbage is collected every ``POINTS_BETWEEN_SEARCHES`` points, and only among objects made since the last
    collection. Planning time is therefore linear in the number of points.
    """
    said = time.monotonic()
    gc.disable()
    try:
        for number, overrides in enumerate(combinations, start=1):
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("planning: %d of %d points", number, len(combinations))
            yield overrides
            if number % POINTS_BETWEEN_SEARCHES == 0:
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()
        gc.enable()


def _point(overrides: Sequence[str], composed: Composed, alike: Alike) -> GridPoint:
    config, given, folder = composed.config, composed.given, composed.folder
    described = None
    try:
        if (known := alike.find(composed)) is None:
            run = alike.run(composed)
            described = described_by(run)
            known = Known(run, described, alike.stage(run, composed))
            _ = known.stage.key  # reads the data, which may be missing
            alike.keep(composed, known)
    except (UserError, OmegaConfBaseException) as error:
        if described is None:
            keys = {"stage": "stage", "task": "task.name", "method": "method.name", "seed": "seed"}
            described = {name: OmegaConf.select(config, key) for name, key in keys.items()}
        return GridPoint(tuple(overrides), folder, folder.name, described, error=in_words(error, config, given))
    return GridPoint(tuple(overrides), folder, known.stage.key, known.described, known.run, known.stage)
