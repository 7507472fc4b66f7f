"""Points of a grid: every combination of its values, except those that are dropped or merged with an equal point."""

import ast
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from simpleeval import EvalWithCompoundTypes, InvalidExpression

from distill_runner.common.errors import UserError, command, first_line, override, quantity
from distill_runner.common.schema import Schema
from distill_runner.compose.explain import user_facing_error
from distill_runner.compose.run_config import RunConfig, typed_run
from distill_runner.pipeline import status
from distill_runner.pipeline.build import training_conditions
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.store import Store
from distill_runner.report.identity import recorded_identity
from distill_runner.report.result import describe_run

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0
# Every word that is neither quoted nor in _WORDS is a configuration key. Keys are replaced by variable names, because
# Python cannot evaluate dotted keys of mappings, nor `lambda` as a name.
_KEY = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*""")
_WORDS = {"and", "or", "not", "in", "is", "if", "else", "True", "False", "None"}
_ABSENT = object()
TOO_DEEP = (RecursionError, MemoryError)
"""Errors of Python's parser for a condition that is nested too deeply."""
SUBDIR = "hydra.sweep.subdir"
NO_SUBDIR = "Leave it out, or " + override(SUBDIR, "${hydra.job.override_dirname}")
MAX_PRINTED = 200
"""Characters of a condition that a message repeats."""


class SweepConfig(Schema):
    """Which points of a grid are trained, and how.

    Args:
        where: conditions on the keys of a point, such as ``loss.eta + loss.lambda <= 1``. A point that fails one of
            them is dropped.
        retry_failed: train points again that failed in an earlier run of the sweep.
        wait: false queues the points with Slurm and returns at once; the same command later reports their status.
        halving: n, for successive halving: of the settings in each cell of the table, the best 1/n continue after
            1/n^2 and again after 1/n of the epochs, by the mean over their seeds. None trains all points to the end.
        shard: i/n, for the points i, i + n, i + 2n, ... only, counted from 0, so that n commands share a sweep. None
            trains all points.
    """

    where: list[str] = Field(default_factory=list)
    retry_failed: bool = False
    wait: bool = True
    halving: int | None = Field(None, ge=2)
    shard: str | None = None

    def model_post_init(self, _context: object) -> None:
        if self.halving and (self.shard or not self.wait):
            problem = "compares all points, which sweep.shard and sweep.wait=false leave to other commands"
            raise UserError("sweep.halving", self.halving, problem, "Leave out one of the two.")
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard or "0/1", re.ASCII)
        if not match or int(match[1]) >= int(match[2]):
            problem = "must be i/n, with i from 0 to n - 1"
            raise UserError("sweep.shard", self.shard, problem, "The first of four: " + override("sweep.shard", "0/4"))

    def shard_of(self, grid: "Grid") -> "Grid":
        """Return the part of ``grid`` that ``shard`` names; all of it without ``shard``.

        Raises:
            UserError: there are more parts than points.
        """
        if self.shard is None:
            return grid
        index, count = map(int, self.shard.split("/"))
        if count > len(grid.points):
            problem = f"the sweep has only {quantity(len(grid.points), 'point')}"
            raise UserError("sweep.shard", self.shard, problem, f"Take at most {len(grid.points)} parts.")
        return Grid(grid.point, grid.points[index::count])


def holds(condition: str, config: DictConfig) -> bool:
    """Return whether the configuration of a point meets ``condition``.

    A condition consists of comparisons and arithmetic over keys, numbers and quoted text, without function calls.

    Raises:
        UserError: ``condition`` cannot be read, or names a key that does not exist.
    """
    values: dict[str, Any] = {}

    def name_of(match: re.Match[str]) -> str:
        word = match[0]
        if word in _WORDS or word[0] in "'\"":
            return word
        name = f"_{len(values)}"
        value = OmegaConf.select(config, word, default=_ABSENT)
        values[name] = value.get("name", _ABSENT) if isinstance(value, DictConfig) else value  # as in method == 'rkd'
        if values[name] is _ABSENT:
            remedy = f"Put text in quotes: '{word}'. All keys: " + command("distill-run --cfg job")
            raise UserError("sweep.where", condition, f"there is no key {word} with a value", remedy)
        return name

    expression = _KEY.sub(name_of, condition)
    try:
        if any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(ast.parse(expression, mode="eval"))):
            raise InvalidExpression("calls and attributes are not allowed")
        return bool(EvalWithCompoundTypes(names=values, functions={}).eval(expression))
    except (InvalidExpression, SyntaxError, TypeError, LookupError, ValueError, ArithmeticError, *TOO_DEEP) as error:
        remedy = "For example: " + override("sweep.where", ["loss.eta + loss.lambda <= 1"])
        text = condition if len(condition) <= MAX_PRINTED else f"{condition[:MAX_PRINTED]}..."
        raise UserError("sweep.where", text, f"is not a condition: {first_line(error)}", remedy) from error


@dataclass(frozen=True, eq=False)
class GridPoint:
    """One combination of the grid's values.

    Attributes:
        overrides: overrides of the sweep's configuration that define the point.
        folder: folder of the point's run.
        key: key of the point's artifact in the store; the name of the folder if the point cannot run.
        description: names of the point, such as task, method and seed, as in its result.
        run, stage: typed configuration and resolved stage; None if the point cannot run.
        error: error that keeps the point from running; None if it can run.
    """

    overrides: tuple[str, ...]
    folder: Path
    key: str
    description: Mapping[str, Any]
    run: RunConfig | None = None
    stage: Stage | None = None
    error: Exception | None = None

    @property
    def names(self) -> Mapping[str, Any]:
        """Names of the point, including its key."""
        if self.stage is None or self.run is None:
            return {"key": self.key, **self.description}
        return {**recorded_identity(self.stage, training_conditions()), **self.description}

    @property
    def student(self) -> Stage:
        """The stage of a point that can run."""
        assert self.stage is not None
        return self.stage

    def result(self) -> Mapping[str, Any]:
        """Return the result of the point's run, or its names with a status if the run has no result."""
        recorded = status.read_run(self.folder) or {}
        if recorded.get("key", self.key) != self.key:  # a run on other data, or of an earlier version
            recorded = {}
        return {**self.names, "folder": str(self.folder), "status": "not run", **recorded}

    def has_ended(self, retry_failed: bool) -> bool:
        """Return whether a sweep has nothing to train: the point is done, or failed and is not to be retried."""
        state = self.result()["status"]
        return state == "done" or (state == "failed" and not retry_failed)

    def has(self, stage: Stage) -> bool:
        """Return whether a stage is in the store of the point's run."""
        assert self.run is not None
        return Store(self.run.store.dir).has(stage.spec)

    def fail(self, error: str) -> None:
        """Record in the folder that the point failed because of ``error``, unless it has a finished run.

        A point whose data cannot be read today may have been trained when they could.
        """
        if (status.read_run(self.folder) or {}).get("status") != "done":
            status.write_status(self.folder, "failed", self.names, error)


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

    def __str__(self) -> str:
        """The number of points, with the numbers by status, merged and dropped."""
        states = [point.result()["status"] for point in self.points]
        notes = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "not run"]
        notes += [f"{len(self.merged)} merged with an equal point"] if self.merged else []
        notes += [f"{len(self.dropped)} dropped by sweep.where"] if self.dropped else []
        return quantity(len(self.points), "point") + (f" ({'; '.join(notes)})" if notes else "")

    def to_train(self, retry_failed: bool) -> list[GridPoint]:
        """Return the points that are still to be trained. Points that cannot run are logged and recorded as failed."""
        todo = [point for point in self.points if not point.has_ended(retry_failed)]
        if failed := sum(point.result()["status"] == "failed" for point in self.points if point not in todo):
            again = override("sweep.retry_failed", True)
            log.warning("%s failed in an earlier run of this sweep; %s trains again", quantity(failed, "point"), again)
        for point in todo:
            if point.error:
                log.error("%s", point.error)
                point.fail(str(point.error))
        return [point for point in todo if not point.error]


def combinations(overrides: Sequence[Override]) -> Iterator[tuple[str, ...]]:
    """Yield every combination of the values of a sweep's overrides; the last override varies fastest.

    Raises:
        UserError: an override has no values, or an interval of them, which only other sweepers search.
    """
    values: dict[str, list[str]] = {}
    for part in overrides:
        key = part.get_key_element()
        if part.is_interval_sweep():
            remedy = "List the values, or take a sweeper that searches an interval: "
            remedy += override("hydra/sweeper", "optuna")
            raise UserError(key, None, "is an interval, and a grid takes single values", remedy)
        if part.is_sweep_override():
            values[key] = [*part.sweep_string_iterator()]
            if not values[key]:
                raise UserError(key, (part.input_line or "").partition("=")[2], "stands for no value")
        else:
            values[key] = [part.get_value_element_as_str()]
    return product(*([f"{key}={value}" for value in texts] for key, texts in values.items()))


def expand(
    master: DictConfig,
    loader: ConfigLoader,
    arguments: Sequence[str],
    where: Sequence[str],
    students: Sequence[str] = (),
) -> Grid:
    """Return every combination of the values in ``arguments``; the last argument varies fastest.

    Args:
        master: configuration of the sweep itself.
        where: conditions that a point must meet.
        students: further students, as overrides in one text each, with every combination of the other arguments.
    Raises:
        UserError, HydraException: ``arguments`` or ``where`` cannot be read.
    """
    parser = OverridesParser.create(config_loader=loader)
    others = [argument for argument in arguments if not argument.startswith(("student=", "student."))]
    parts = [[*arguments], *([*others, *shlex.split(student)] for student in students)]
    distinct = dict.fromkeys(point for part in parts for point in combinations(parser.parse_overrides(part)))

    def compose(overrides: Sequence[str]) -> DictConfig:
        return loader.load_sweep_config(master, [*overrides])

    grid, first = Grid(lambda overrides: _point(overrides, compose(overrides))), dict[str, GridPoint]()
    last_line = time.monotonic()
    for number, overrides in enumerate(distinct, start=1):
        if time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            log.info("planning: %d of %d points", number, len(distinct))
        config = compose(overrides)
        if not all(holds(condition, config) for condition in where):
            grid.dropped.append(overrides)
            continue
        point = _point(overrides, config)
        if point.key in first:
            grid.merged.append((point, first[point.key]))
        else:
            first[point.key] = point
            grid.points.append(point)
    if len({point.folder for point in grid.points}) < len(grid.points):
        raise UserError(SUBDIR, None, "names one folder for several points", NO_SUBDIR)
    return grid


def _point(overrides: Sequence[str], config: DictConfig) -> GridPoint:
    """Return the point with the composed configuration ``config``, whose node ``hydra`` is removed."""
    raw: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if re.search(r"\$\{hydra:|hydra\.job\.(num|id)\b", str(raw["subdir"])):
        raise UserError(SUBDIR, None, "is known in a job alone; a repeated sweep has others", NO_SUBDIR)
    folder = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir).absolute()
    all_overrides = config.hydra.overrides.task
    with open_dict(config):
        del config["hydra"]  # some of its values exist only in a job
    names = None
    try:
        run = typed_run(config, all_overrides)
        names = describe_run(run)
        stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
        return GridPoint(tuple(overrides), folder, stage.key, names, run, stage)  # the key reads the data
    except (UserError, OmegaConfBaseException) as error:
        if names is None:
            keys = {"stage": "stage", "task": "task.name", "method": "method.name", "seed": "seed"}
            names = {name: OmegaConf.select(config, key) for name, key in keys.items()}
        problem = user_facing_error(error, config, all_overrides)
        return GridPoint(tuple(overrides), folder, folder.name, names, error=problem)
