"""Composes the configurations of a sweep's points, fast enough for thousands of points."""

import json
import pickle
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.composed import PARTS
from distill_runner.compose.hydra_private import apply_overrides, read_once, with_number
from distill_runner.compose.resolvers import run_key
from distill_runner.compose.template import Template

PLAIN = (int, float, str, bool, type(None))
"""Types of values that replace an earlier value completely instead of being merged with it."""


@dataclass(frozen=True)
class Composed:
    """Composed configuration of a point.

    Attributes:
        config: configuration without the node ``hydra``.
        given: all overrides of the point, including those of the sweep.
        sweep: Hydra's node ``hydra.sweep``, which determines the folder.
    """

    config: DictConfig
    given: Sequence[str]
    sweep: Any

    resolved: Mapping[str, Any] | None = None
    """Resolved values of ``PARTS``; None if no template applies to the point or they cannot be resolved."""

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Each stage of ``resolved`` as JSON text, by which equal stages are recognised."""
        stages = self.resolved["stages"] if self.resolved else {}
        return {name: json.dumps(stage, default=str) for name, stage in stages.items()}

    @property
    def folder(self) -> Path:
        stages = self.resolved["stages"] if self.resolved else None
        key = run_key(_root_=self.config, stages=stages)
        return Path(self.sweep.dir, self.sweep._get_node("subdir")._value().replace("${run_key:}", key)).absolute()


class Composer:
    """Composes the configurations of points.

    Hydra composes each choice of groups once. Other values are then set on copies of that configuration.

    Args:
        constant: overrides that all points have in common.
    """

    def __init__(
        self, master: DictConfig, loader: ConfigLoader, parser: OverridesParser, constant: Set[str] = frozenset()
    ) -> None:
        read_once(loader)
        self.constant = constant
        self.master, self.loader, self.parser = master, loader, parser
        # A group that holds only other groups counts too, as in sweep=alp_kd/table1.
        self.is_group = cache(lambda key: bool(loader.get_group_options(key, results_filter=None)))
        self.composed: dict[tuple[str, ...], tuple[bytes, DictConfig]] = {}  # pickled: a copy takes a sixth of the time
        self.parsed: dict[str, Override] = {}
        self.templates: dict[tuple[tuple[str, ...], ...], Template | None] = {}

    def __call__(self, overrides: Sequence[str]) -> Composed:
        parsed = list(map(self._parsed, overrides))
        values = [override for override in parsed if not self._is_choice(override)]
        choices = tuple(str(override.input_line) for override in parsed if self._is_choice(override))
        if choices not in self.composed:
            composed = self.loader.load_sweep_config(self.master, list(choices))
            with open_dict(composed):  # some values of the node have no value until a job runs
                hydra = composed.pop("hydra")
            self.composed[choices] = pickle.dumps(composed), hydra
        pickled, hydra = self.composed[choices]
        given = [*hydra.overrides.task, *(str(value.input_line) for value in values)]
        template = self._template(choices, values, pickled)
        config, rest = (template.config, self._varying(values)) if template else (pickle.loads(pickled), values)
        apply_overrides(rest, config)
        try:
            resolved = template.resolved() if template else None
        except (UserError, OmegaConfBaseException):  # raised again and recorded where the point is made
            resolved = None
        return Composed(config, given, hydra.sweep, resolved)

    def _template(self, choices: tuple[str, ...], values: Sequence[Override], pickled: bytes) -> Template | None:
        """Return the template for points with the same ``choices`` and keys.

        None if a value is not plain, or if the template cannot be resolved.
        """
        varying = self._varying(values)
        if not all(value.type == OverrideType.CHANGE and isinstance(value.value(), PLAIN) for value in varying):
            return None
        keys = tuple(value.key_or_group for value in varying)
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
        """Parse an override. Hydra takes a millisecond, so a number is not parsed if its key had a number before."""
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
