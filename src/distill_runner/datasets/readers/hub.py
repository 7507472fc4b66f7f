"""Datasets on the hub: the files of one split at one commit, in a folder that ``datasets`` can read.

Only the files of the configuration and the split are downloaded: one of GLUE's ten tasks, or the split of IMDB in use.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common import hub
from distill_runner.common.errors import UserError, override
from distill_runner.common.hub import HubError
from distill_runner.common.library_switches import offline_datasets
from distill_runner.datasets.readers.dataset import Dataset, is_embedded, parse_split
from distill_runner.datasets.readers.files import local_data, missing_split
from distill_runner.datasets.readers.formats import file_format
from distill_runner.datasets.readers.table import class_names, library_errors

CARD = "README.md"
_KEYS_OF_FILES = {"config_name", "data_files", "data_dir", "default", "description", "version", "sep", "delimiter"}
"""Keys of a configuration in a card that say which files it has, or what these show; others say how to read them."""
FILES_WITHOUT_ROWS = (CARD, ".huggingface.yaml", "dataset_infos.json", ".gitattributes")


def dataset_commit(data: Dataset) -> hub.Commit:
    """Return the commit of the dataset that this run reads.

    Raises:
        UserError: the dataset or the revision does not exist, or the hub cannot be reached.
    """
    with _hub_errors(data):
        return hub.resolve_commit("dataset", data.dataset, data.revision)


def load_from_hub(data: Dataset, split: str, cache: Path) -> Any:
    """Download a split, and return its files.

    Args:
        cache: empty folder for what ``datasets`` writes.
    Returns:
        The files, and the names of classes that the dataset's card gives by column. Other formats, and CSV files whose
        card sets options of pandas, are returned as a dataset of the library ``datasets``.
    Raises:
        UserError: the files cannot be downloaded, or the configuration or the split does not exist.
        FileProblem: the files cannot be read.
    """
    commit, revision = dataset_commit(data), data.revision or "main"
    with _hub_errors(data):
        card = _card(data, hub.download(commit, FILES_WITHOUT_ROWS, revision))
        config, patterns = _split_patterns(data, split, card)
        snapshot = hub.download(commit, patterns, revision)
    existing = sorted(file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file())
    names = [name for name in hub.matching_files(existing, patterns) if name not in FILES_WITHOUT_ROWS]
    if all(name.endswith(".py") for name in names):
        problem = f"{data.dataset} on the hub has no {data.config or 'data'} files"
        remedy = "If it is a script, its converted files: " + override(f"{data.key}.revision", "refs/convert/parquet")
        raise UserError(f"{data.key}.dataset", data.dataset, problem, remedy)
    links = cache / "links" / commit.name.rpartition("/")[2]
    for name in names:
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to((snapshot / name).resolve())
    if config is not None:  # alone in the card, so that ``datasets`` finds no other configuration
        own_infos = _infos(card, config["config_name"])
        metadata = {"configs": [config]} | ({"dataset_info": own_infos} if own_infos else {})
        (links / CARD).write_text(f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n", encoding="utf-8")
    import datasets

    with library_errors(), offline_datasets():
        builder = datasets.load_dataset_builder(str(links), data.config, cache_dir=str(cache))
        paths = builder.config.data_files or {}
        if split not in paths:
            raise missing_split(data, split, list(map(str, paths)), f"{data.dataset} on the hub")
        files = sorted(map(Path, paths[split]))
        options = [getattr(builder.config, name, None) for name in ("column_names", "header", "skiprows")]
        if all(map(file_format, files)) and all(option in (None, "infer", 0) for option in options):
            return files, class_names(builder.info.features or {})
        return datasets.load_dataset(str(links), data.config, split=split, streaming=True)


def stream_from_hub(data: Dataset, split: str) -> Any:
    """Return a split as a dataset of the library ``datasets`` that downloads rows while it is iterated over.

    Raises:
        UserError: as ``load_from_hub``.
    """
    commit = dataset_commit(data)
    source: dict[str, Any] = {"path": commit.name, "name": data.config, "revision": commit.sha}
    import datasets

    with library_errors():
        splits = datasets.load_dataset(**source, streaming=True)
        if split not in splits:
            raise missing_split(data, split, list(splits), f"{data.dataset} on the hub")
        if all(builder.__name__ != "Csv" for builder in type(datasets.load_dataset_builder(**source)).__mro__):
            return splits[split]
        # The types of CSV would be those of the first rows: 007 is 7.
        names = splits[split].column_names or list(next(iter(splits[split])))
        features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        options: dict[str, Any] = {"features": features, "keep_default_na": False, "na_filter": False}
        return datasets.load_dataset(**source, split=split, streaming=True, **options)


def is_downloaded(data: Dataset, split: str) -> bool:
    """Return whether a split can be read without the network: from a folder, embedded, or downloaded before.

    Raises:
        UserError: as ``load_from_hub``, as far as it is known without the network.
    """
    source, name = data.locate(split)
    if is_embedded(source) or local_data(source) is not None:
        return True
    commit = dataset_commit(source)
    if hub.missing_files(commit, FILES_WITHOUT_ROWS):
        return False
    _, patterns = _split_patterns(source, parse_split(name)[0], _card(source, commit.folder))
    return commit.folder.is_dir() and not hub.missing_files(commit, patterns)


def check_card(data: Dataset, split: str, folder: Path, files: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names of classes by column in the card of a local folder, which must not name other files.

    Args:
        folder: folder of the configuration.
        files: files of the split by their names.
    Raises:
        UserError: the card gives other files to the split, or says how to read them.
    """
    root = folder.parent if data.config else folder
    card = _card(data, root)
    try:
        config, patterns = _split_patterns(data, split, card)
        patterns = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in patterns]
        listed = {file for pattern in patterns for file in root.glob(pattern.lstrip("/")) if file_format(file)}
    except (UserError, ValueError, TypeError, KeyError):  # the card has no such split, or is none of ``datasets``
        config, listed = None, set()
    if config is not None and (split == "train" or isinstance(config.get("data_files", []), list)):
        options = {key: value for key, value in config.items() if key not in _KEYS_OF_FILES}
        if options or (listed and ({*files} != listed if "data_files" in config else {*files} - listed)):
            sides = (sorted(os.path.relpath(file, root) for file in own)[:3] for own in (listed, files))
            in_card, by_name = map(", ".join, sides)
            rest = f" with {options}" if options else ""
            problem = f"is {in_card}{rest} in its {CARD}, but {by_name} by name"
            raise UserError(data.split_key(split), split, problem, f"Correct or remove configs in {root / CARD}.")
    infos = _infos(card, data.config or (config or {}).get("config_name", "default"))
    features = [one for info in infos[:1] for one in info.get("features") or () if isinstance(one, Mapping)]
    kinds: Any = {one["name"]: one.get("dtype") or one.get("sequence") or one.get("list") or () for one in features}
    labels = {name: kind["class_label"].get("names") for name, kind in kinds.items() if "class_label" in kind}
    # Cards list the names, or give each by its number.
    by_number = {name: own if isinstance(own, Mapping) else dict(enumerate(own)) for name, own in labels.items() if own}
    return {name: [own[number] for number in sorted(own, key=int)] for name, own in by_number.items()}


def _card(data: Dataset, folder: Path) -> Mapping[str, Any]:
    """Return the metadata at the head of the dataset's card; empty if there is none.

    Raises:
        UserError: they are no YAML.
    """
    file = folder / CARD
    parts = file.read_text(encoding="utf-8-sig", errors="replace").split("---\n", 2) if file.exists() else []
    try:
        metadata = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except yaml.YAMLError as error:
        remedy = "Correct the lines between its two lines of ---, or remove them."
        raise UserError(f"{data.key}.dataset", data.dataset, f"the head of its {CARD} is no YAML", remedy) from error
    return metadata if isinstance(metadata, Mapping) else {}


def _infos(card: Mapping[str, Any], config: str | None = None) -> list[Mapping[str, Any]]:
    """Return what the card says of a configuration, or of each: its columns and splits."""
    infos = card.get("dataset_info") or []
    infos = infos if isinstance(infos, list) else [infos]
    return [own for own in infos if isinstance(own, Mapping) and config in (None, own.get("config_name", "default"))]


def _split_patterns(data: Dataset, split: str, card: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the configuration that the card gives, if any, without other splits, and glob patterns of their files.

    The configuration is that of ``data``, or the default or only one.

    Raises:
        UserError: the card lists other configurations, or other splits.
    """
    entries = [config for config in card.get("configs") or [] if isinstance(config, Mapping)]
    configs = {str(config["config_name"]): dict(config) for config in entries if "config_name" in config}
    if not configs:
        return None, [f"{data.config}/*"] if data.config else ["*"]
    defaults = [name for name, config in configs.items() if config.get("default") or name == "default"]
    with_info = [own for info in _infos(card) if (own := str(info.get("config_name"))) in configs]
    name = data.config or next((names[0] for names in (defaults[:1], [*configs], with_info) if len(names) == 1), None)
    if name not in configs:
        problem = "needs a value" if name is None else "no such configuration"
        remedy = f"It has: {', '.join(list(configs)[:20])}."
        raise UserError(f"{data.key}.config", data.config, f"{problem} in {data.dataset} on the hub", remedy)
    config, files = configs[name], configs[name].get("data_files") or "**"
    if isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
        config["data_files"] = [entry for entry in files if entry.get("split") == split]
        if not config["data_files"]:
            names = [str(entry.get("split")) for entry in files]
            raise missing_split(data, split, names, f"{data.dataset} on the hub")
        files = [entry.get("path") or [] for entry in config["data_files"]]
    prefix = f"{str(config['data_dir']).strip('/')}/" if config.get("data_dir") else ""
    files = files if isinstance(files, list) else [files]
    patterns = [f"{prefix}{path}" for paths in files for path in ([paths] if isinstance(paths, str) else paths)]
    return config, [*patterns, *(pattern.replace("**/", "") for pattern in patterns if "**/" in pattern)]


@contextmanager
def _hub_errors(data: Dataset) -> Iterator[None]:
    """Turn errors of the hub into ``UserError``s that also say where the data is looked for on this machine."""
    files = f"{data.config}/" if data.config else "its files"
    try:
        yield
    except HubError as error:
        name = data.dataset.rpartition("/")[2]
        remedy = override(f"{data.key}.dataset", f"<folder with {files}>")
        remedy += f", or set DISTILL_DATA_DIR to a folder with {name}/"
        raise error.for_key(f"{data.key}.dataset", data.dataset, remedy) from error
