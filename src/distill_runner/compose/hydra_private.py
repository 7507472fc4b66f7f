"""The only module that uses private names of Hydra and OmegaConf. Written against hydra-core 1.3: a test checks it."""

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, wraps
from typing import TYPE_CHECKING, Any

import hydra._internal.defaults_list
import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, base, flag_override

if TYPE_CHECKING:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

__all__ = [
    "BasicSweeper",
    "CachedFiles",
    "FileConfigSource",
    "application",
    "apply_overrides",
    "cache_files",
    "combinations",
    "parse_options",
    "speed_up_composing",
    "with_value",
]


def __getattr__(name: str) -> Any:
    """Import ``BasicSweeper`` on first use, because Hydra's search for plugins executes its module a second time.

    The module then defines a new class. The ``__init__`` of an older class would call ``super`` of the new class.
    """
    if name != "BasicSweeper":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    return BasicSweeper


def parse_options(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the options and overrides that Hydra's parser recognizes, and the arguments that it does not."""
    options, rest = get_args_parser().parse_known_args(arguments)
    return options, rest


def combinations(overrides: list[Override]) -> list[list[str]]:
    """Return every combination of the values of a sweep; the last override varies fastest."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (batch,) = BasicSweeper.split_arguments(overrides, None)
    return list(batch)


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set values in a configuration that is already composed."""
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def with_value(override: Override, value: Any, text: str) -> Override:
    """Return the override that sets another plain value, as the parser reads it of ``text``."""
    return replace(override, _value=value, input_line=text)


class CachedFiles(ConfigRepository):
    """Configuration files, parsed once for all points; composing a point then takes 40% less time."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.files: dict[str, bytes] = {}
        super().__init__(loader.get_search_path())

    def __deepcopy__(self, memo: Any) -> "CachedFiles":
        return self  # Hydra copies the repository for each composition

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.files:
            self.files[config_path] = pickle.dumps(super().load_config(config_path))
        result: ConfigResult | None = pickle.loads(self.files[config_path])  # composing changes the result
        return result

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Set the folders; files of other folders are forgotten."""
        super().initialize_sources(config_search_path)
        self.files = {}


def cache_files(loader: ConfigLoader, files: CachedFiles | None = None) -> None:
    """Make ``loader`` read each file only once; ``files`` holds the files that were read before."""
    assert isinstance(loader, ConfigLoaderImpl)
    if files or not isinstance(loader.repository, CachedFiles):
        loader.repository = files or CachedFiles(loader)


@cache
def speed_up_composing() -> None:
    """Let Hydra compose the same in less than half of the time.

    OmegaConf parses each text with an interpolation once. Hydra makes the table of its choices only for a file whose
    defaults refer to it, and copies the content of files by pickle, which takes a sixth of the time of ``deepcopy``.
    """
    base.parse = lru_cache(maxsize=4096)(base.parse)  # type: ignore[attr-defined]
    module: Any = hydra._internal.defaults_list
    make_table = module._create_interpolation_map

    @wraps(make_table)
    def table_if_read(overrides: Any, defaults_list: Sequence[Any], self_added: bool) -> DictConfig | None:
        if any(default.is_interpolation() for default in defaults_list):
            table: DictConfig = make_table(overrides, defaults_list, self_added)
            return table
        return None

    embed = ConfigLoaderImpl._embed_result_config

    @wraps(embed)
    def embed_copy(result: ConfigResult, package_override: str | None) -> ConfigResult:
        package = result.header["package"] if package_override is None else package_override
        if not package:
            return embed(result, package_override)
        embedded, config = copy.copy(result), OmegaConf.create()
        with flag_override(config, "no_deepcopy_set_nodes", True):
            OmegaConf.update(config, package, pickle.loads(pickle.dumps(result.config)), merge=False)
        embedded.config = config
        return embedded

    module._create_interpolation_map = table_if_read
    ConfigLoaderImpl._embed_result_config = staticmethod(embed_copy)  # type: ignore[assignment, method-assign]


class Application(hydra._internal.hydra.Hydra):
    """Hydra's application, without what it would do twice for a command.

    Hydra composes the whole configuration first for ``hydra.mode`` alone, and once more to run it.

    Attributes:
        has_open_mode: whether the configuration may set ``hydra.mode``, so that it must be composed to know the mode.
    """

    has_open_mode = True

    def __init__(self, task_name: str, config_loader: ConfigLoader) -> None:
        super().__init__(task_name, config_loader)
        cache_files(config_loader)

    def get_mode(self, config_name: str | None, overrides: list[str], *parsed: Any, **more: Any) -> RunMode | None:
        """Return the mode that the configuration sets; None if it sets none, or if ``--multirun`` decides."""
        mode: RunMode | None = None
        if self.has_open_mode:
            mode = super().get_mode(config_name, overrides, *parsed, **more)  # since 1.4, the parsed overrides too
        return mode


@contextmanager
def application(has_open_mode: bool) -> Iterator[None]:
    """Let Hydra start an ``Application`` within the context."""
    module: Any = hydra._internal.hydra
    original, Application.has_open_mode = module.Hydra, has_open_mode
    module.Hydra = Application
    try:
        yield
    finally:
        module.Hydra = original
