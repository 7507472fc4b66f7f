"""Datasets on the hub: the files of one split at one commit, in a folder that ``datasets`` can read.

Only the files of the configuration and the split are downloaded: one of GLUE's ten tasks, or the split of IMDB in use.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common import downloads, hub
from distill_runner.common.errors import UserError
from distill_runner.common.hub import HubError
from distill_runner.common.library_switches import offline_datasets
from distill_runner.datasets.readers.dataset import Dataset, is_embedded, parse_split
from distill_runner.datasets.readers.files import (
    file_format,
    local_copies,
    local_data,
    missing_split,
    unreadable_split,
)

log = logging.getLogger(__name__)

CARD = "README.md"
FILES_WITHOUT_ROWS = (CARD, ".huggingface.yaml", "dataset_infos.json", ".gitattributes")
LARGE = 10_000_000
"""Size in bytes above which reading takes a while and is logged."""


def dataset_commit(data: Dataset) -> hub.Commit:
    """Return the commit of the dataset that this run reads.

    Raises:
        UserError: the dataset or the revision does not exist, or the hub cannot be reached.
    """
    with _hub_errors(data):
        return hub.resolve_commit("dataset", data.dataset, data.revision)


@dataclass(frozen=True)
class SplitFiles:
    """Downloaded files of a split, and the names of classes that the dataset's card gives, by column."""

    files: list[Path]
    class_names: dict[str, list[str]]


def load_from_hub(data: Dataset, split: str, folder: Path, **options: Any) -> Any:
    """Download a split into ``folder``, and return its files.

    Returns:
        ``SplitFiles``, for the readers of this package. Other formats, and CSV files whose card sets options of
        pandas, are returned as a dataset of the library ``datasets``.
    Raises:
        UserError: the files cannot be downloaded or read, or the configuration or the split does not exist.
    """
    links = _download_split(data, split, folder)
    if (size := sum(file.stat().st_size for file in links.rglob("*"))) > LARGE:
        log.info("reading %s of %s: %.0f MB", split, " ".join(filter(None, (data.dataset, data.config))), size / 1e6)
    with _library_errors(data, split, offline=True) as datasets:
        builder = datasets.load_dataset_builder(str(links), data.config, cache_dir=str(folder.parent))
    paths = builder.config.data_files or {}
    if split not in paths:
        raise missing_split(data, split, list(map(str, paths)), f"{data.dataset} on the hub")
    files = [Path(path) for path in paths[split]]
    if all(map(file_format, files)) and not _sets_options(builder.config):
        return SplitFiles(sorted(files), _class_names(builder.info.features or {}))
    with _library_errors(data, split, offline=True) as datasets:
        return datasets.load_dataset(str(links), data.config, split=split, verification_mode="no_checks", **options)


def stream_from_hub(data: Dataset, split: str) -> Any:
    """Return a split as a dataset of the library ``datasets`` that downloads rows while it is iterated over.

    Raises:
        UserError: as ``load_from_hub``.
    """
    commit = dataset_commit(data)
    source: dict[str, Any] = {"path": commit.name, "name": data.config, "revision": commit.sha}
    with _library_errors(data, split, offline=False) as datasets:
        splits = datasets.load_dataset(**source, streaming=True)
        builders = type(datasets.load_dataset_builder(**source)).__mro__
        is_csv = any(builder.__name__ == "Csv" for builder in builders)
    if split not in splits:
        raise missing_split(data, split, list(splits), f"{data.dataset} on the hub")
    if not is_csv:
        return splits[split]
    with _library_errors(data, split, offline=False) as datasets:  # its types are those of the first rows: 007 is 7
        names = splits[split].column_names or list(next(iter(splits[split])))
        features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        options: dict[str, Any] = {"features": features, "keep_default_na": False, "na_filter": False}
        return datasets.load_dataset(**source, split=split, streaming=True, **options)


@contextmanager
def _library_errors(data: Dataset, split: str, offline: bool) -> Iterator[Any]:
    """Yield the library ``datasets``; with ``offline``, it makes no request. Its errors name the dataset."""
    import datasets

    with offline_datasets() if offline else nullcontext():
        try:
            yield datasets
        except MemoryError:
            raise
        except Exception as error:
            raise unreadable_split(data, split, f"{data.dataset} on the hub", error) from error


def _sets_options(config: Any) -> bool:
    """Return whether the card sets options of pandas that change what the rows of a CSV file are."""
    return any(getattr(config, name, None) not in (None, "infer", 0) for name in ("column_names", "header", "skiprows"))


def _class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: feature.names for name, feature in inner.items() if getattr(feature, "names", None)}


def _download_split(data: Dataset, split: str, folder: Path) -> Path:
    """Download the files of a split and return a folder of links to them, created in ``folder``."""
    commit, revision = dataset_commit(data), data.revision or "main"
    with _hub_errors(data):
        card = _card_metadata(downloads.download(commit, FILES_WITHOUT_ROWS, revision))
        config, patterns = _split_patterns(data, split, card)
        snapshot = downloads.download(commit, patterns, revision)
    existing = sorted(file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file())
    files = [name for name in downloads.matching_files(existing, patterns) if name not in FILES_WITHOUT_ROWS]
    if not files or all(name.endswith(".py") for name in files):
        problem = f"{data.dataset} on the hub has no {data.config or 'data'} files"
        remedy = f"If it is a script: {data.key}.revision=refs/convert/parquet has its converted files."
        raise UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
    links = folder / commit.name.rpartition("/")[2]
    _link_files(links, snapshot, files)
    if config is not None:
        _write_card(links / CARD, card, config)
    return links


def _split_patterns(data: Dataset, split: str, card: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the configuration that the card gives, if any, and glob patterns of the split's files."""
    config = _select_config(data, card)
    if config is not None:
        return config, _restrict_to_split(data, split, config)
    return None, [f"{data.config}/*"] if data.config else ["*"]


def is_downloaded(data: Dataset, split: str) -> bool:
    """Return whether a split can be read without the network: from a folder, embedded, or downloaded before.

    Raises:
        UserError: as ``load_from_hub``, as far as it is known without the network.
    """
    source, name = data.locate(split)
    if is_embedded(source) or local_data(source) is not None:
        return True
    commit = dataset_commit(source)
    if downloads.missing_files(commit, FILES_WITHOUT_ROWS):
        return False
    _, patterns = _split_patterns(source, parse_split(name)[0], _card_metadata(commit.folder))
    return commit.folder.is_dir() and not downloads.missing_files(commit, patterns)


def fingerprint(data: Dataset, splits: Iterable[str]) -> str:
    """Return a hash of what a commit holds of some splits: their files, and what the card says of how to read them.

    Another commit with the same files has the same hash, whatever else its card says. Without a list of the commit's
    files, as in a cache of an older ``huggingface_hub`` or offline, the hash stands for the whole commit.

    Raises:
        UserError: as ``load_from_hub``, as far as it is known before any file with rows is downloaded.
    """
    commit, total = dataset_commit(data), hashlib.sha256()
    whole_commit = f"hub:{commit.sha}/{data.config or ''}"
    with _hub_errors(data):
        try:
            card = _card_metadata(downloads.download(commit, FILES_WITHOUT_ROWS, data.revision or "main"))
        except HubError as error:
            if not hub.is_offline(error):
                raise
            return whole_commit
    if (ids := downloads.file_ids(commit)) is None:
        return whole_commit
    for split in sorted({parse_split(split)[0] for split in splits}):
        config, patterns = _split_patterns(data, split, card)
        names = set(downloads.matching_files(ids, patterns)) - set(FILES_WITHOUT_ROWS)
        features = [info.get("features") for info in _own_infos(card, config)] if config else []
        how = json.dumps([split, data.config, config, features], sort_keys=True, default=str)
        total.update(f"{how}\0{downloads.content_hash(ids, names)}\n".encode())
    return f"hub-files:{total.hexdigest()}"


def _link_files(links: Path, snapshot: Path, files: Sequence[str]) -> None:
    for name in files:
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to((snapshot / name).resolve())


def _write_card(file: Path, card: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write a card that describes ``config`` alone, so that ``datasets`` finds no other configuration."""
    own_infos = _own_infos(card, config)
    metadata = {"configs": [dict(config)]} | ({"dataset_info": own_infos} if own_infos else {})
    file.write_text(f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n", encoding="utf-8")


def _own_infos(card: Mapping[str, Any], config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a card says of the columns of ``config``."""
    infos = card.get("dataset_info", [])
    infos = infos if isinstance(infos, list) else [infos]
    return [info for info in infos if info.get("config_name", "default") == config["config_name"]]


def _card_metadata(folder: Path) -> Mapping[str, Any]:
    """Return the metadata at the head of the dataset's card; empty if there is none."""
    file = folder / CARD
    parts = file.read_text(encoding="utf-8").split("---\n", 2) if file.exists() else []
    try:
        metadata = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except yaml.YAMLError:
        metadata = {}
    return metadata if isinstance(metadata, Mapping) else {}


def _select_config(data: Dataset, card: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration ``data.config``, or the default or only one; None if the card lists none."""
    entries = [config for config in card.get("configs") or [] if isinstance(config, Mapping)]
    configs = [config for config in entries if "config_name" in config and {"data_files", "data_dir"} & config.keys()]
    if not configs:
        return None
    names = [str(config["config_name"]) for config in configs]
    name = data.config
    if name is None:
        defaults = [str(config["config_name"]) for config in configs if config.get("default")]
        defaults += ["default"] if "default" in names else []
        name = defaults[0] if defaults else names[0] if len(names) == 1 else None
    if name not in names:
        problem = "needs a value" if name is None else "no such configuration"
        remedy = f"It has: {', '.join(names[:20])}."
        raise UserError(f"{data.key}.config", data.config, f"{problem} in {data.dataset} on the hub", remedy)
    return dict(configs[names.index(name)])


def _restrict_to_split(data: Dataset, split: str, config: dict[str, Any]) -> list[str]:
    """Return glob patterns of the split's files; if ``config`` lists splits, remove the others from it."""

    def as_strings(value: Any) -> list[str]:
        return [str(item) for item in (value if isinstance(value, list) else [value])]

    files = config.get("data_files", "**")
    if isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
        names = [str(entry.get("split")) for entry in files]
        if split not in names:
            raise missing_split(data, split, names, f"{data.dataset} on the hub")
        config["data_files"] = files = [entry for entry in files if entry.get("split") == split]
        paths = [path for entry in files for path in as_strings(entry["path"])]
    else:
        paths = as_strings(files)
    prefix = f"{str(config['data_dir']).strip('/')}/" if config.get("data_dir") else ""
    patterns = [f"{prefix}{path}" for path in paths]
    return [*patterns, *(pattern.replace("**/", "") for pattern in patterns if "**/" in pattern)]


@contextmanager
def _hub_errors(data: Dataset) -> Iterator[None]:
    """Turn errors of the hub into ``UserError``s that also say where the data is looked for on this machine."""
    files = f"{data.config}/" if data.config else "its files"
    try:
        yield
    except HubError as error:
        if copies := local_copies(data):
            error.problem = f"{copies[0]} (DISTILL_DATA_DIR) has no {files}, and {error.problem}"
        name = data.dataset.rpartition("/")[2]
        remedy = f"{data.key}.dataset=<folder with {files}>, or set DISTILL_DATA_DIR to a folder with {name}/"
        raise error.for_key(f"{data.key}.dataset", data.dataset, remedy) from error
