"""Options and values that had another name in an earlier release, and the rewriting of the old names.

An old name works for one release, on the command line, in Python and in a user's own YAML files. Each old name that is
used is reported once, in one line that gives the new name.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.compose.folders import choices

RENAMED_OPTIONS: dict[str, str] = {
    "task.kind": "task.type",
    "task.deviation": "task.std",
    "attention.kind": "attention.type",
    "method.terms.*.attention.kind": "method.terms.*.attention.type",
    "loss.followed": "loss.num_checkpoints",
    "method.terms.*.followed": "method.terms.*.num_checkpoints",
    "route.at": "route.moment",
    "teacher.given": "teacher.prediction_source",
    "teacher.prediction_source.kind": "teacher.prediction_source.type",
    "stages.*.given": "stages.*.prediction_source",
    "stages.*.prediction_source.kind": "stages.*.prediction_source.type",
    "recipe.readings": "recipe.assumptions",
    "method.readings": "method.assumptions",
    "student.readings": "student.assumptions",
    "task.readings": "task.assumptions",
    "corpus.readings": "corpus.assumptions",
}
"""New dotted key by old dotted key; ``*`` stands for any one name.

Keys below an old key move along. An entry also applies below ``stages.<name>`` and ``template``.
"""
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "transfer": {"labelled": "labeled"},
    # Hydra 1.4 reads a name with a slash in a defaults list as a choice in a group of groups.
    "recipe": {f"pro_kd/{name}": f"pro_kd_{name}" for name in ("bert_small", "cifar", "distilroberta")},
}
"""New value by old value, for each key or group (in its new spelling). A user's own file of the old name keeps it."""
RENAMED_RESOLVERS = {"named_by": "own_task_name", "of_plan": "plan_suffix"}
OPEN_OPTIONS = ("task.test.",)
"""Beginnings of keys that took a + in an earlier release, and now need none."""
LAST_RELEASE = "0.3"
"""Release that no longer knows the old names."""

Path = tuple[str, ...]
_reported = set[tuple[str, str]]()


def current_override(override: str) -> str:
    """Return an override with new names in place of old ones."""
    if not (match := re.fullmatch(r"([+~]{0,2})([\w./-]+)(@[^=]*)?(?:=(.*))?", override, re.DOTALL)):
        return override
    sign, old, package, value = match.groups()
    key = ".".join(_current_path(tuple(old.split("."))))
    if sign == "+" and key.startswith(OPEN_OPTIONS):
        _report(f"+{key}", key)
        sign = ""
    if value is None:
        return f"{sign}{key}{package or ''}"
    return f"{sign}{key}{package or ''}={_current_value(key, _current_references(value, key))}"


def current_file(content: Any, package: str) -> Any:
    """Return the content of a configuration file with new names in place of old ones.

    Args:
        content: the file as plain values, interpolations unresolved.
        package: dotted key below which Hydra puts the file's content; empty for the top level.
    Raises:
        UserError: the new key lies outside the file's package, so that the file itself cannot hold it.
    """
    if not isinstance(content, Mapping):
        return content
    prefix = tuple(package.split(".")) if package else ()
    result: dict[str, Any] = {}
    if "defaults" in content:
        result["defaults"] = [_current_default(entry) for entry in content["defaults"] or ()]
    _copy({key: value for key, value in content.items() if key != "defaults"}, prefix, prefix, result)
    return result


def _copy(node: Mapping[Any, Any], path: Path, prefix: Path, result: dict[str, Any]) -> None:
    """Copy ``node``, found at ``path`` of the configuration, into ``result``, the content of a file at ``prefix``."""
    for name, value in node.items():
        if path == ("hydra", "sweeper", "params") or "." in str(name):  # the name is itself a dotted key
            target, name = path, ".".join(_current_path(tuple(str(name).split("."))))
            value = _current_value(name, value) if isinstance(value, str) else value
        else:
            *parents, name = _current_path((*path, str(name))) if isinstance(name, str) else (*path, name)
            target = tuple(parents)
        if target[: len(prefix)] != prefix:
            old, new = ".".join((*path, str(name))), ".".join((*target, str(name)))
            raise UserError(old, None, f"is now {new}", "Set it in a file with the line '# @package _global_'.")
        place = result
        for parent in target[len(prefix) :]:
            place = place.setdefault(parent, {})
        if isinstance(value, Mapping) and value:
            place.setdefault(name, {})
            _copy(value, (*target, name), prefix, result)
        else:
            place[name] = _current_node(value, ".".join(map(str, (*target, name))))


def _current_node(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_current_node(item, key) for item in value]
    if isinstance(value, Mapping):
        return {name: _current_node(item, key) for name, item in value.items()}
    return _current_value(key, _current_references(value, key)) if isinstance(value, str) else value


def _current_default(entry: Any) -> Any:
    """Return an entry of a defaults list with new names."""
    if not isinstance(entry, Mapping):
        return entry
    result = {}
    for group, value in entry.items():
        name = str(group).split()[-1].partition("@")[0].lstrip("/")
        values = [_current_value(name, one) if isinstance(one, str) else one for one in _as_list(value)]
        result[group] = values if isinstance(value, list) else values[0]
    return result


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _current_path(path: Path) -> Path:
    """Return the new path of an option; ``path`` itself if it has no other name."""
    head = path[:2] if path[0] == "stages" else path[:1] if path[0] == "template" else ()
    changed = True
    while changed:
        changed = False
        for old, new in RENAMED_OPTIONS.items():
            for start in {0, len(head)}:
                if (moved := _moved(path[start:], tuple(old.split(".")), tuple(new.split(".")))) is not None:
                    _report(".".join(path[start : start + old.count(".") + 1]), ".".join(moved[: new.count(".") + 1]))
                    path, changed = (*path[:start], *moved), True
    return path


def _moved(path: Path, old: Path, new: Path) -> Path | None:
    """Return ``path`` with its beginning ``old`` replaced by ``new``; None if it does not begin with ``old``."""
    if len(path) < len(old) or any(sign not in ("*", name) for sign, name in zip(old, path, strict=False)):
        return None
    names = iter([name for sign, name in zip(old, path, strict=False) if sign == "*"])
    return (*(next(names) if sign == "*" else sign for sign in new), *path[len(old) :])


def _current_value(key: str, value: str) -> str:
    """Return the text of a value with new names. It may hold several values, as in ``a,b`` and ``choice(a,b)``."""
    for old, new in RENAMED_VALUES.get(key, {}).items():
        word = rf"(?<![\w./-]){re.escape(old)}(?![\w./-])"
        if re.search(word, value) and old not in choices(key):
            _report(f"{key}={old}", f"{key}={new}")
            value = re.sub(word, new, value)
    return value


def _current_references(value: str, key: str) -> str:
    """Return the text of a value with new names in its interpolations, and in the conditions of ``sweep.where``."""
    if "." not in value and "${" not in value:
        return value
    for old, new in RENAMED_RESOLVERS.items():
        if f"${{{old}:" in value:
            _report(f"${{{old}:...}}", f"${{{new}:...}}")
            value = value.replace(f"${{{old}:", f"${{{new}:")
    pattern = r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)+" if key == "sweep.where" else r"(?<=\$\{)\w+(?:\.\w+)+"
    return re.sub(pattern, lambda match: ".".join(_current_path(tuple(match[0].split(".")))), value)


def _report(old: str, new: str) -> None:
    if (old, new) not in _reported:
        _reported.add((old, new))
        print(f"{old} is now {new}; the old name works until {LAST_RELEASE}", file=sys.stderr)
