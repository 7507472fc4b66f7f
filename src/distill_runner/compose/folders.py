"""Folders of configuration: the package's, and before it a user's own, whose files add to it or override it."""

from pathlib import Path

from distill_runner.common.errors import UserError

OWN = "conf"
"""In the working folder; found by itself."""


class _Given:
    """What ``--config-dir`` names, for this process."""

    folder: Path | None = None
    typed: str | None = None


def config_folder() -> Path:
    """The configuration inside the installed package, else that of the checkout."""
    packaged = Path(__file__).parents[1] / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "conf"


def give(folder: str | None) -> None:
    """Take a user's configuration from ``folder`` instead of the working folder; None for the latter again.

    Raises:
        UserError: there is no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError("--config-dir", folder, "there is no such folder")
    _Given.folder, _Given.typed = Path(folder).absolute() if folder is not None else None, folder


def config_dir() -> list[str]:
    """The option that names the user's configuration, as it was typed; empty where none was."""
    return ["--config-dir", _Given.typed] if _Given.typed is not None else []


def own_folder() -> Path | None:
    """A user's own configuration, if there is one.

    A folder ``conf`` of another program is left alone: one with a ``config.yaml``, or with none of this package's
    groups.
    """
    if _Given.folder is not None:
        return _Given.folder
    folder = Path.cwd() / OWN
    if not folder.is_dir() or folder.samefile(config_folder()) or (folder / "config.yaml").exists():
        return None
    groups = {path.name for path in config_folder().iterdir() if path.is_dir()}
    return folder if any(path.name in groups for path in folder.iterdir() if path.is_dir()) else None


def folders() -> list[Path]:
    """All of them, the one that goes first at the front."""
    own = own_folder()
    return [*([own] if own else []), config_folder()]


def choices(group: str) -> list[str]:
    """The names that a group takes."""
    places = [folder / group for folder in folders()]
    return sorted({file.relative_to(at).with_suffix("").as_posix() for at in places for file in at.rglob("*.yaml")})


def groups() -> list[str]:
    """The groups that have any names."""
    names = {path.name for folder in folders() for path in folder.iterdir() if path.is_dir()}
    return [name for name in sorted(names - {"hydra"}) if choices(name)]
