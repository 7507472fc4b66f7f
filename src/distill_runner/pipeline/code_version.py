"""Version of the code that computes stages, which is part of their keys.

``code_version.json`` records a number and the hash of the code that it stands for. As long as the code has this hash,
keys hold the number; edited code puts its own hash into them, so that artifacts of other code are not taken for its
own. Comments, docstrings and formatting do not count. Only modules whose bytes differ from the record are parsed.

    python -m distill_runner.pipeline.code_version --same   # record the code again: it computes the same
    python -m distill_runner.pipeline.code_version --next   # record it under the next number: artifacts are rebuilt
"""

import argparse
import ast
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("methods", "models", "training", "tasks", "datasets")
"""Packages that compute stages."""
MODULES = ("common/seeds.py", "pipeline/build.py", "pipeline/inputs.py", "pipeline/targets.py")
"""Modules of other packages that compute stages.

The rest of ``pipeline`` and ``common`` says what a stage is, which its spec holds, and where its artifacts are.
"""
UNCOUNTED = ("tasks/account.py", "tasks/score_account.py", "models/weights.py")
"""Modules that only report."""
ROOT = Path(__file__).parents[1]
DATA_CODE = ("tasks", "datasets", "pipeline/inputs.py")
"""Packages and modules that compute tokens and labels."""
PARSES = 10
"""Number of attempts to parse a module."""
RECORD = Path(__file__).with_name("code_version.json")


def module_hashes(root: Path = ROOT) -> dict[str, str]:
    """Return the hash of each module that computes, by its path below ``root``."""
    return {path: source_hash(file.read_text(encoding="utf-8")) for path, file in _modules(root).items()}


def _modules(root: Path) -> dict[str, Path]:
    files = [file for package in PACKAGES for file in (root / package).rglob("*.py")]
    files = sorted([*files, *(root / module for module in MODULES)])
    paths = {file.relative_to(root).as_posix(): file for file in files}
    return {path: file for path, file in paths.items() if path not in UNCOUNTED}


def recorded_or_parsed(recorded: Mapping[str, Any], root: Path = ROOT) -> dict[str, str]:
    """Return the ``module_hashes``, without parsing the modules whose bytes are those that were recorded.

    To parse all modules takes as long as to import them. A seal holds for one content and one hash only.

    Args:
        recorded: content of ``RECORD``.
    """
    hashes, seals, modules = dict[str, str](), recorded.get("seals", {}), recorded["modules"]
    for path, file in _modules(root).items():
        content = file.read_bytes()
        is_recorded = path in modules and seals.get(path) == seal(content, modules[path])
        hashes[path] = modules[path] if is_recorded else source_hash(content.decode("utf-8"))
    return hashes


def seal(content: bytes, module_hash: str) -> str:
    """Return a hash of a module's bytes together with its ``source_hash``."""
    return hashlib.sha256(module_hash.encode() + content).hexdigest()[:16]


def source_hash(source: str) -> str:
    """Return a hash of Python source without comments, docstrings and formatting."""
    return hashlib.sha256(repr(_content(_parse(source))).encode()).hexdigest()[:12]


def _parse(source: str) -> ast.AST:
    for _ in range(PARSES - 1):
        with suppress(SystemError):  # Python 3.11 raises it if another thread parses at the same time
            return ast.parse(source)
    return ast.parse(source)


def _content(value: Any) -> Any:
    """Return a syntax tree as nested lists, the same in each version of Python.

    Newer versions have more fields, which are empty in code that older ones can read. 3.12.1 ends some f-strings with
    an empty text.
    """
    if isinstance(value, list):
        return [_content(part) for part in value if not _is_text(part)]  # docstrings, also those of attributes
    if not isinstance(value, ast.AST):
        return value
    if isinstance(value, ast.JoinedStr):
        value = ast.JoinedStr([part for part in value.values if getattr(part, "value", None) != ""])
    fields = [[name, _content(part)] for name, part in ast.iter_fields(value) if part is not None and part != []]
    return [type(value).__name__, *fields]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def total_hash(hashes: Mapping[str, str]) -> str:
    """Return one hash of the hashes of all modules."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def record() -> dict[str, Any]:
    """Return the recorded version: its number, hash, and the hashes of its modules."""
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


@cache
def code_version(parts: tuple[str, ...] | None = None) -> int | str:
    """Return the recorded number if the code is what was recorded, else the beginning of its hash.

    Args:
        parts: the packages and modules that count; None for all code that computes stages.
    """

    def selected(hashes: Mapping[str, str]) -> dict[str, str]:
        return {path: own for path, own in hashes.items() if not parts or {path, path.partition("/")[0]} & {*parts}}

    recorded, current = record(), selected(loaded_hashes())
    return int(recorded["version"]) if current == selected(recorded["modules"]) else total_hash(current)[:16]


@cache
def loaded_hashes() -> dict[str, str]:
    """Return the ``module_hashes`` of the code that this process runs: those when they were first read."""
    return recorded_or_parsed(record())


def changed_modules(hashes: Mapping[str, str]) -> list[str]:
    """Return the modules whose code differs from that with these hashes."""
    current = loaded_hashes()
    return sorted(name for name in {*current, *hashes} if current.get(name) != hashes.get(name))


def main() -> None:
    """Record the current code."""
    parser = argparse.ArgumentParser(description="Record the code that computes stages.")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--same", action="store_true", help="it computes the same as before: keep the number")
    choice.add_argument("--next", action="store_true", help="it computes something else: artifacts are built again")
    version = (record()["version"] if RECORD.exists() else 0) + int(parser.parse_args().next)
    hashes = module_hashes()
    seals = {path: seal(file.read_bytes(), hashes[path]) for path, file in _modules(ROOT).items()}
    content = {"version": version, "sha256": total_hash(hashes), "modules": hashes, "seals": seals}
    RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"recorded version {version}")


if __name__ == "__main__":
    main()
