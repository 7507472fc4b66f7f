"""Data sets on the hub: download of the files of one split at one commit, in a folder that ``datasets`` can read.

Only the files of the configuration and the split are downloaded: one of GLUE's ten tasks, or the split of IMDB in use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.common.hub_errors import NotThere
from distill_runner.datasets.reading.dataset import Dataset
from distill_runner.datasets.reading.folders import local_copies, missing_split

CARD = "README.md"
DESCRIBING = (CARD, ".huggingface.yaml", "dataset_infos.json", ".gitattributes")
"""Files of a repository that contain no rows."""


def commit(data: Dataset) -> hub.Commit:
    """Return the commit of the data set that this run reads.

    Raises:
        UserError: the data set or the revision does not exist, or the hub cannot be asked.
    """
    with _told(data):
        return hub.commit("dataset", data.dataset, data.revision)


def fetched(data: Dataset, split: str, place: Path) -> Path:
    """Download the files of ``split`` and return a folder of links to them, created in ``place``.

    Raises:
        UserError: the files cannot be downloaded, or the configuration or the split does not exist.
    """
    found, revision = commit(data), data.revision or "main"
    with _told(data):
        card = _card(hub.fetch(found, DESCRIBING, revision))
        config = _chosen(data, card)
        patterns = ["*"]
        if config is not None:
            patterns = _patterns(data, split, config)
        elif data.config:
            patterns = [f"{data.config}/*"]
        folder = hub.fetch(found, patterns, revision)
    there = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    chosen = [name for name in hub.matching(there, patterns) if name not in DESCRIBING]
    if not chosen or all(name.endswith(".py") for name in chosen):
        problem = f"the hub's {data.dataset} has no {data.config or 'data'} files"
        remedy = f"If it is a script: {data.key}.revision=refs/convert/parquet has its converted files."
        raise UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
    return _laid_out(place / found.name.rpartition("/")[2], folder, chosen, card, config)


def _laid_out(
    view: Path, folder: Path, files: Sequence[str], card: Mapping[str, Any], config: Mapping[str, Any] | None
) -> Path:
    for name in files:
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to((folder / name).resolve())
    if config is not None:
        described = card.get("dataset_info", [])
        infos = described if isinstance(described, list) else [described]
        same = [info for info in infos if info.get("config_name", "default") == config["config_name"]]
        shown = {"configs": [dict(config)]} | ({"dataset_info": same} if same else {})
        (view / CARD).write_text(f"---\n{yaml.safe_dump(shown, sort_keys=False)}---\n")
    return view


def _card(folder: Path) -> Mapping[str, Any]:
    """Return the metadata at the head of the data set's card; empty if there is none."""
    file = folder / CARD
    parts = file.read_text(encoding="utf-8").split("---\n", 2) if file.exists() else []
    try:
        described = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except yaml.YAMLError:
        described = {}
    return described if isinstance(described, Mapping) else {}


def _chosen(data: Dataset, card: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration ``data.config``, or the default or only one; None if the card lists none."""
    listed = [config for config in card.get("configs") or [] if isinstance(config, Mapping)]
    configs = [config for config in listed if "config_name" in config and {"data_files", "data_dir"} & config.keys()]
    if not configs:
        return None
    names = [str(config["config_name"]) for config in configs]
    wanted = data.config
    if wanted is None:
        usual = [str(config["config_name"]) for config in configs if config.get("default")]
        usual += ["default"] if "default" in names else []
        wanted = usual[0] if usual else names[0] if len(names) == 1 else None
    if wanted not in names:
        problem = "needs a value" if wanted is None else "no such configuration"
        remedy = f"It has: {', '.join(names[:20])}."
        raise UserError(f"{data.key}.config", data.config, f"{problem} in {data.dataset} on the hub", remedy)
    return dict(configs[names.index(wanted)])


def _patterns(data: Dataset, split: str, config: dict[str, Any]) -> list[str]:
    """Return glob patterns of the split's files; if ``config`` lists splits, remove the others from it."""
    files = config.get("data_files", "**")
    if isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
        names = [str(entry.get("split")) for entry in files]
        if split not in names:
            raise missing_split(data, split, names, f"{data.dataset} on the hub")
        config["data_files"] = files = [entry for entry in files if entry.get("split") == split]
        paths = [path for entry in files for path in _listed(entry["path"])]
    else:
        paths = _listed(files)
    below = f"{str(config['data_dir']).strip('/')}/" if config.get("data_dir") else ""
    plain = [f"{below}{path}" for path in paths]
    return [*plain, *(path.replace("**/", "") for path in plain if "**/" in path)]


def _listed(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


@contextmanager
def _told(data: Dataset) -> Iterator[None]:
    files = f"{data.config}/" if data.config else "its files"
    try:
        yield
    except NotThere as error:
        if copies := local_copies(data):
            error.problem = f"{copies[0]} (DISTILL_DATA_DIR) has no {files}, and {error.problem}"
        name = data.dataset.rpartition("/")[2]
        remedy = f"{data.key}.dataset=<folder with {files}>, or set DISTILL_DATA_DIR to a folder with {name}/"
        raise error.of(f"{data.key}.dataset", data.dataset, remedy) from error
