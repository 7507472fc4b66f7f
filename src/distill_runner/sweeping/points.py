"""The points of a grid: every combination of its values, less those that are dropped, merged or done."""

import gc
import logging
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.composed import PARTS, typed_run
from distill_runner.compose.config import RunConfig
from distill_runner.compose.explain import in_words
from distill_runner.compose.hydra_private import apply_overrides, combinations, read_once, with_number
from distill_runner.compose.resolvers import run_key
from distill_runner.compose.template import Template
from distill_runner.pipeline import status
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.report.result import described_by
from distill_runner.sweeping.conditions import holds

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
PLAIN = (int, float, str, bool, type(None))
"""Values that replace what was there as a whole."""


@dataclass(frozen=True, eq=False)
class GridPoint:
    """One combination of the grid's values.

    Attributes:
        overrides: that make it of the sweep's configuration.
        folder: of its run.
        key: of what it yields in the store; the folder's name for one that cannot run.
        described: its names, as in its result.
        error: why it cannot run at all, if so.
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
        """What it is called, with its key."""
        return {"key": self.key, **self.described}

    def result(self) -> Mapping[str, Any]:
        """What has become of it: its result, or its names with a status."""
        found = status.read(self.folder) or {"status": "not run"}
        if found.get("key", self.key) != self.key:  # of other data, or of an earlier version
            found = {"status": "not run"}
        return {**self.names, "folder": str(self.folder), **found}

    def fail(self, error: str) -> None:
        """Record that it cannot run."""
        status.write(self.folder, "failed", self.names, error)


@dataclass
class Grid:
    """What a sweep's arguments come to.

    Attributes:
        point: makes one of overrides.
        dropped: overrides of the points that ``sweep.where`` excludes.
        merged: points that mean the same as an earlier one, which comes second.
    """

    point: Callable[[Sequence[str]], GridPoint]
    points: list[GridPoint] = field(default_factory=list)
    dropped: list[tuple[str, ...]] = field(default_factory=list)
    merged: list[tuple[GridPoint, GridPoint]] = field(default_factory=list)


def expand(master: DictConfig, loader: ConfigLoader, arguments: Sequence[str], where: Sequence[str]) -> Grid:
    """Every combination of the values in ``arguments``, the last argument varying fastest.

    Args:
        master: the configuration of the sweep itself.
    Raises:
        UserError, HydraException: arguments or conditions that cannot be read.
    """
    parser = OverridesParser.create(config_loader=loader)
    every = combinations(parser.parse_overrides(list(arguments)))
    constant = set(every[0]).intersection(*every) if every else set()
    compose = _Composer(master, loader, parser, constant)
    grid, first = Grid(lambda overrides: _point(overrides, compose(overrides))), dict[str, GridPoint]()
    for overrides in _watched(list(dict.fromkeys(map(tuple, every)))):  # a value that is given twice is one
        composed = compose(overrides)
        if not all(holds(condition, composed.config) for condition in where):
            grid.dropped.append(overrides)
            continue
        point = _point(overrides, composed)
        if point.key in first:
            grid.merged.append((point, first[point.key]))
        else:
            first[point.key] = point
            grid.points.append(point)
    return grid


def _watched(combinations: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The same, with a line every few seconds, and without searches for garbage, which grow with what is kept."""
    said = time.monotonic()
    gc.disable()
    try:
        for number, overrides in enumerate(combinations):
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("planning: %d of %d points", number, len(combinations))
            yield overrides
    finally:
        gc.enable()


@dataclass(frozen=True)
class _Composed:
    """A point's configuration without the part of Hydra, its overrides with the sweep's own, and where it is to lie."""

    config: DictConfig
    given: Sequence[str]
    sweep: Any

    resolved: Mapping[str, Any] | None = None
    """The parts that a run is made of; None if they cannot be resolved."""

    @property
    def folder(self) -> Path:
        stages = self.resolved["stages"] if self.resolved else None
        key = run_key(_root_=self.config, stages=stages)
        return Path(self.sweep.dir, self.sweep._get_node("subdir")._value().replace("${run_key:}", key)).absolute()


class _Composer:
    """Configurations of points. Hydra composes each choice of groups once; values are then set on copies of it."""

    def __init__(
        self, master: DictConfig, loader: ConfigLoader, parser: OverridesParser, constant: Set[str] = frozenset()
    ) -> None:
        read_once(loader)
        self.constant = constant
        self.master, self.loader, self.parser = master, loader, parser
        # Groups of groups count too: sweep=alp_kd/table1.
        self.is_group = cache(lambda key: bool(loader.get_group_options(key, results_filter=None)))
        self.composed: dict[tuple[str, ...], tuple[bytes, DictConfig]] = {}  # pickled: copied in a sixth of the time
        self.parsed: dict[str, Override] = {}
        self.templates: dict[tuple[tuple[str, ...], ...], Template | None] = {}

    def __call__(self, overrides: Sequence[str]) -> _Composed:
        parsed = list(map(self._parsed, overrides))
        values = [override for override in parsed if not self._is_choice(override)]
        choices = tuple(str(override.input_line) for override in parsed if self._is_choice(override))
        if choices not in self.composed:
            composed = self.loader.load_sweep_config(self.master, list(choices))
            with open_dict(composed):  # parts of Hydra's have a value only while a job runs
                hydra = composed.pop("hydra")
            self.composed[choices] = pickle.dumps(composed), hydra
        pickled, hydra = self.composed[choices]
        given = [*hydra.overrides.task, *(str(value.input_line) for value in values)]
        template = self._template(choices, values, pickled)
        config, rest = (template.config, self._varying(values)) if template else (pickle.loads(pickled), values)
        apply_overrides(rest, config)
        try:
            resolved = template.resolved() if template else None
        except (UserError, OmegaConfBaseException):  # told where the point is made
            resolved = None
        return _Composed(config, given, hydra.sweep, resolved)

    def _template(self, choices: tuple[str, ...], values: Sequence[Override], pickled: bytes) -> Template | None:
        """For points of the same choices that set the same keys to plain values; None if there is none for these."""
        if not all(value.type == OverrideType.CHANGE and isinstance(value.value(), PLAIN) for value in values):
            return None
        keys = tuple(value.key_or_group for value in self._varying(values))
        kind = (choices, keys, tuple(str(value.input_line) for value in values if value.input_line in self.constant))
        if kind not in self.templates:
            config = pickle.loads(pickled)
            try:
                apply_overrides(values, config)
                self.templates[kind] = Template(config, PARTS, keys)
            except OmegaConfBaseException:
                self.templates[kind] = None
        return self.templates[kind]

    def _varying(self, values: Sequence[Override]) -> list[Override]:
        return [value for value in values if value.input_line not in self.constant]

    def _parsed(self, override: str) -> Override:
        """Hydra's grammar takes a millisecond for one; a number for a key that had one before needs none."""
        key, _, value = override.partition("=")
        if (alike := self.parsed.get(key)) and re.fullmatch(r"0|[1-9]\d{0,17}", value):
            return with_number(alike, int(value), override)
        if override not in self.parsed:
            (self.parsed[override],) = self.parser.parse_overrides([override])
            if type(self.parsed[override].value()) is int:
                self.parsed[key] = self.parsed[override]
        return self.parsed[override]

    def _is_choice(self, override: Override) -> bool:
        return self.is_group(override.key_or_group) or override.is_delete()


def _point(overrides: Sequence[str], composed: _Composed) -> GridPoint:
    config, given, folder = composed.config, composed.given, composed.folder
    keys = {"stage": "stage", "task": "task.name", "method": "method.name", "seed": "seed"}
    described = {name: OmegaConf.select(config, key) for name, key in keys.items()}
    try:
        run = typed_run(config, given, composed.resolved)
        described = described_by(run)
        stage = resolve(run.stages, run.stage, run.runtime.precision)
        key = stage.key  # reads the data, which may be missing
    except (UserError, OmegaConfBaseException) as error:
        return GridPoint(tuple(overrides), folder, folder.name, described, error=in_words(error, config, given))
    return GridPoint(tuple(overrides), folder, key, described, run, stage)
