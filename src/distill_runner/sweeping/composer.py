"""Composes the configurations of the points of a sweep, each choice of groups and each common value once."""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from distill_runner.common.errors import UserError
from distill_runner.compose.hydra_private import apply_overrides, cache_files, with_value
from distill_runner.compose.parts import resolved_parts
from distill_runner.compose.resolvers import folder_name, run_key
from distill_runner.compose.varying import VaryingConfig, sets_plain_values

RUN_KEY = "${run_key:}"
_WHOLE_NUMBER = re.compile(r"0|[1-9]\d{0,17}")


@dataclass(frozen=True)
class Composed:
    """Composed configuration of a point.

    Attributes:
        compose: function that returns the configuration without the node ``hydra``.
        overrides: all overrides of the point, including those of the sweep.
        folders: folder of each point, with ``RUN_KEY`` for the name of its run.
        resolved: values of ``resolved_parts``; None if they cannot be resolved.
    """

    compose: Callable[[], DictConfig]
    overrides: Sequence[str]
    folders: str
    resolved: Mapping[str, Any] | None = None

    @cached_property
    def config(self) -> DictConfig:
        """Configuration without the node ``hydra``, made when it is first read: most points only need ``resolved``."""
        return self.compose()

    @property
    def folder(self) -> Path:
        if parts := self.resolved:
            names = parts["runtime"]["precision"], parts["task"]["name"], parts["method"]["name"]
            key = folder_name(parts["stages"], parts["stage"], *names)
        else:
            key = run_key(_root_=self.config)
        return Path(self.folders.replace(RUN_KEY, key))


@dataclass(frozen=True)
class _Choices:
    """What the points with the same choices of groups have in common.

    Attributes:
        config: the pickled configuration; to unpickle it takes a sixth of the time of a copy.
        overrides: the overrides that make the choices.
        folders: as in ``Composed``.
    """

    config: bytes
    overrides: Sequence[str]
    folders: str


class Composer:
    """Composes the configurations of points.

    Hydra composes each choice of groups once. Other values are then set on copies of that configuration, and points
    that set plain values for the same keys resolve only what depends on these keys.

    Args:
        constant: overrides that all points have in common.
    """

    def __init__(
        self, master: DictConfig, loader: ConfigLoader, parser: OverridesParser, constant: Set[str] = frozenset()
    ) -> None:
        cache_files(loader)
        self.master, self.loader, self.parser, self.constant = master, loader, parser, constant
        # A group that holds only other groups counts too, as in sweep=alp_kd/table1.
        self.is_group = cache(lambda key: bool(loader.get_group_options(key, results_filter=None)))
        self.composed: dict[tuple[str, ...], _Choices] = {}
        self.parsed: dict[str, Override] = {}
        self.varying: dict[tuple[tuple[str, ...], ...], VaryingConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> Composed:
        parsed = list(map(self._parsed, overrides))
        values = [override for override in parsed if not self._is_choice(override)]
        choices = tuple(str(override.input_line) for override in parsed if self._is_choice(override))
        if choices not in self.composed:
            config = self.loader.load_sweep_config(self.master, list(choices))
            with open_dict(config):  # some values of the node have no value until a job runs
                hydra = config.pop("hydra")
            folders = Path(hydra.sweep.dir, hydra.sweep._get_node("subdir")._value()).absolute()
            self.composed[choices] = _Choices(pickle.dumps(config), [*hydra.overrides.task], str(folders))
        composed = self.composed[choices]

        def compose() -> DictConfig:
            copy: DictConfig = pickle.loads(composed.config)
            apply_overrides(values, copy)
            return copy

        all_overrides = [*composed.overrides, *(str(value.input_line) for value in values)]
        try:
            resolved = self._resolved(choices, values, compose)
        except (UserError, OmegaConfBaseException):  # raised again and recorded where the point is made
            resolved = None
        return Composed(compose, all_overrides, composed.folders, resolved)

    def _resolved(
        self, choices: tuple[str, ...], values: Sequence[Override], compose: Callable[[], DictConfig]
    ) -> Mapping[str, Any]:
        varying = [value for value in values if value.input_line not in self.constant]
        if not varying or not sets_plain_values(varying, values):
            return resolved_parts(compose())
        others = tuple(str(value.input_line) for value in values if value.input_line in self.constant)
        keys = tuple(value.key_or_group for value in varying)
        if (group := (choices, others, keys)) not in self.varying:
            self.varying[group] = VaryingConfig(compose(), keys)
        return self.varying[group].resolved(varying)

    def _parsed(self, override: str) -> Override:
        """Parse an override. Hydra takes a millisecond, so whole numbers take the place of others of their key."""
        if override not in self.parsed:
            key, _, value = override.partition("=")
            if _WHOLE_NUMBER.fullmatch(value) and (same_key := self.parsed.get(f"{key}=")):
                self.parsed[override] = with_value(same_key, int(value), override)
            else:
                (self.parsed[override],) = self.parser.parse_overrides([override])
                if _WHOLE_NUMBER.fullmatch(value):
                    self.parsed[f"{key}="] = self.parsed[override]
        return self.parsed[override]

    def _is_choice(self, override: Override) -> bool:
        return self.is_group(override.key_or_group) or override.is_delete()
