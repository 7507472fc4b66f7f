"""Configuration folders: the package's own and a user's, whose files add to the package's files or replace them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIG_DIR = list[str]()
"""The option ``--config-dir`` of this process with its folder, as it was typed; empty if it was not typed."""


def config_folder() -> Path:
    """Return the configuration folder of the installed package, else of the checkout."""
    packaged = Path(__file__).parents[1] / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "conf"


def own_folder() -> Path | None:
    """Return the user's own configuration folder; None if there is none.

    A folder ``conf`` of another program is ignored: one with a ``config.yaml``, or without any of this package's
    groups.
    """
    if CONFIG_DIR:
        return Path(CONFIG_DIR[1]).absolute()
    folder = Path.cwd() / "conf"
    if not folder.is_dir() or folder.samefile(config_folder()) or (folder / "config.yaml").exists():
        return None
    return folder if any((config_folder() / path.name).is_dir() for path in folder.iterdir() if path.is_dir()) else None


def all_folders() -> list[Path]:
    """Return all configuration folders, the one that takes precedence first."""
    return [folder for folder in (own_folder(), config_folder()) if folder]


class OwnConfiguration(SearchPathPlugin):
    """Plugin of Hydra that puts the user's configuration folder before the folder of this package.

    Hydra itself would append the folder of ``--config-dir``, where it could not override a file of this package.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        shipped = str(config_folder())
        is_ours = any(part.path.removeprefix("file://") == shipped for part in search_path.get_path())
        if is_ours and (own := own_folder()):
            search_path.prepend("own", f"file://{own}")


def choices(group: str) -> list[str]:
    """Return the names that can be chosen in ``group``, sorted; files whose names begin with _ are shared by others."""
    roots = [folder / group for folder in all_folders()]
    files = [file.relative_to(root).with_suffix("") for root in roots for file in root.rglob("*.yaml")]
    return sorted({file.as_posix() for file in files if not file.name.startswith("_")})


def groups() -> list[str]:
    """Return the groups with at least one name, sorted and without ``hydra``."""
    names = {path.name for folder in all_folders() for path in folder.iterdir() if path.is_dir()}
    return [name for name in sorted(names - {"hydra"}) if choices(name)]


def configuration_keys() -> dict[str, list[str]]:
    """Return the groups and the dotted keys of all files, each with its origins, such as ``task=rte``."""
    keys: dict[str, list[str]] = {}
    for file, folder in ((file, root) for root in all_folders() for file in sorted(root.rglob("*.yaml"))):
        group = file.relative_to(folder).parent.as_posix()
        keys.setdefault(group, [group])
        if not group.startswith("hydra"):
            text = file.read_text(encoding="utf-8")
            prefix = "" if group == "." or text.startswith("# @package _global_") else f"{group}."
            owner = f"other choices of {group}" if file.stem.startswith("_") else f"{group}={file.stem}"
            owner = file.name if group == "." else owner
            with suppress(yaml.YAMLError):  # of a file that the run does not choose
                for key in _nested_keys(yaml.safe_load(text)):
                    keys.setdefault(f"{prefix}{key}", []).append(owner)
    return keys


def _nested_keys(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield key
        yield from (f"{key}.{inner}" for inner in _nested_keys(value) if key != "assumptions")
