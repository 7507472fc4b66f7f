"""Write the reference from the schemas, the files of `conf/` and the parsers of the subcommands, as the site is built.

A page for each group, with its options and its choices; a page of the options without a group; a page of subcommands.
"""

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from assumptions_page import task_parts
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from distill_runner.commands.parser import SUBCOMMANDS, parser_of
from distill_runner.common.errors import format_value
from distill_runner.common.terminal import markdown_table
from distill_runner.compose.folders import config_folder
from distill_runner.datasets.corpora import Corpus, CorpusPart, TransferPart, TransferSet
from distill_runner.deploy.frontier_sweep import Frontier
from distill_runner.methods.config import TERMS, argument_schema
from distill_runner.methods.hidden_states import Attention
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.schedules import CheckpointSchedule, LayerSchedule
from distill_runner.models.config import ModelConfig
from distill_runner.pipeline.config import PredictionSource, StageConfig, StoreConfig
from distill_runner.sweeping.points import SweepConfig
from distill_runner.tasks import TASK_TYPES
from distill_runner.tracking.trackers import TrackerConfig
from distill_runner.training.config import Optim, Runtime

PAGES = Path(__file__).parents[1] / "reference" / "options"

SCHEMAS: dict[str, type[BaseModel]] = {
    **{f"task.* ({name})": schema for name, schema in TASK_TYPES.items()},
    **{f"{name}.*": schema for name, schema in task_parts() if name.startswith("task.")},
    "optim.*": Optim,
    "runtime.*": Runtime,
    "mapping.*": LayerMapping,
    "attention.*": Attention,
    "schedule.*": LayerSchedule,
    "route.*": CheckpointSchedule,
    "corpus.*": Corpus,
    "corpus.parts.<name>.*": CorpusPart,
    "transfer.*": TransferSet,
    "transfer.parts.<name>.*": TransferPart,
    "tracker.*": TrackerConfig,
    "store.*": StoreConfig,
    "sweep.*": SweepConfig,
    "frontier.*": Frontier,
    "stages.<name>.*": StageConfig,
    "stages.<name>.model.*": ModelConfig,
    "stages.<name>.prediction_source.*": PredictionSource,
    "teacher.prediction_source.*": PredictionSource,
}
"""Schema by the part of the configuration that it checks, as typed on the command line."""

PARTS = {
    "stages.<name>.task.<option>": "as [`task.<option>`](task.md), of this stage alone",
    "stages.<name>.corpus.<option>": "as [`corpus.<option>`](corpus.md), of this stage alone",
    "stages.<name>.transfer.<option>": "as [`transfer.<option>`](transfer.md), of this stage alone",
    "stages.<name>.optim.<option>": "as [`optim.<option>`](optim.md), of this stage alone",
    "stages.<name>.route.<option>": "as [`route.<option>`](route.md)",
    "stages.<name>.method.terms.<term>.<argument>": "as [`method.terms`](method.md), of this stage alone",
    "stages.<name>.method.weights.<term>": "weight of a term in this stage's loss",
    "stages.<name>.method.schedule.<option>": "as [`schedule.<option>`](schedule.md)",
    "stages.<name>.inherits": "stage, or `template`, from which the stage takes the options that it does not set",
    "template.<option>": "as `stages.<name>.<option>`, for each stage with `inherits: template`",
    "method.name": "the method's name in results and tables",
    "method.recipe": "method of a recipe whose values a method without own ones takes",
    "method.terms": "loss terms by name",
    "method.weights": "weights of the terms by name",
    "method.terms.<term>.term": "name of the loss term, from the tables below, or `<module>.<class>` of your own",
    "method.terms.<term>.<argument>": "argument of the loss term, from the tables below",
    "method.weights.<term>": "weight of the term in the loss",
    "pretraining.optim.<option>": "as [`optim.<option>`](optim.md), of the stage that pre-trains",
    "pretraining.method.terms.<term>.<argument>": "as [`method.terms`](method.md), of the stage that pre-trains",
    "pretraining.method.weights.<term>": "weight of the term in the loss of pre-training",
    "teacher.optim.<option>": "as [`optim.<option>`](optim.md), of the teacher",
    "student.architecture.<field>": "field of the configuration of `transformers`, for new weights",
    "assistant.architecture.<field>": "field of the configuration of `transformers`, for new weights",
    "teacher.architecture.<field>": "field of the configuration of `transformers`, for new weights",
    "recipe.tasks": "tasks for which the paper names hyperparameters",
    "recipe.paper": "the paper's name in tables",
    "recipe.<method>.<task>.<option>": "value that the paper names, to which an option refers by `recipe:<option>`",
}
"""Options that repeat under many names, by their pattern, with their meaning."""

NO_OPTION = re.compile(r"(^|\.)(assumptions|says|defaults)(\.|$)|^hydra\b")
"""Keys that record a paper's words, or that are Hydra's."""


@dataclass(frozen=True)
class FileOption:
    """An option that a file of ``conf/`` sets.

    Attributes:
        key: as typed on the command line.
        choice: the file, as ``<group>=<name>``.
        comment: what stands behind the value in the file.
    """

    key: str
    choice: str
    value: str
    comment: str


def file_options() -> Iterator[FileOption]:
    """Yield each option of each file in ``conf/``; a stage's file sets options of ``stages.<name>``."""
    folder = config_folder()
    for file in sorted(folder.rglob("*.yaml"), key=lambda file: ("experiment" in file.parts, file)):
        group, text = file.relative_to(folder).parent.as_posix(), file.read_text(encoding="utf-8")
        if group.startswith(("sweep", "hydra")):
            continue
        package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
        prefix = package[1] if package else {".": "_global_", "stages": "stages.<name>"}.get(group, group)
        choice = f"{group}={file.stem}" if group != "." else file.name
        for path, node in _leaves(yaml.compose(text), () if prefix == "_global_" else (prefix,)):
            key = ".".join(path)
            if not NO_OPTION.search(key):
                yield FileOption(key, choice, _value(node), _comment(text.splitlines(), node))


def _leaves(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _leaves(value, (*path, key.value))
    else:
        yield path, node


def _value(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(_value, node.value))}]"
    return str(node.value) or "null" if isinstance(node, yaml.ScalarNode) else "{}"


def _comment(lines: list[str], node: yaml.Node) -> str:
    """Return the comment behind a value, with the lines that continue it."""
    number = node.end_mark.line - (node.end_mark.column == 0)
    words = re.findall(r"\s#\s+(.*)", lines[number])[:1]
    for line in lines[number + 1 :] if words else []:
        if not (further := re.fullmatch(r"\s{8,}#\s+(.*)", line)):
            break
        words.append(further[1])
    return " ".join(words)


def pages() -> dict[str, str]:
    """Return the pages of the reference as Markdown, by name."""
    options: dict[str, list[FileOption]] = {}
    for option in file_options():
        options.setdefault(option.key.partition(".")[0], []).append(option)
    folder = config_folder()
    groups = {path.name for path in folder.iterdir() if path.is_dir()} - {"hydra"}
    schemas = {prefix.partition(".")[0] for prefix in SCHEMAS}
    single = {name for name, of_name in options.items() if [option.key for option in of_name] == [name]}
    names = sorted(groups | schemas | (options.keys() - single - {"template"}))
    texts = {name: _group_page(name, options.get(name, []), name in groups) for name in names}
    run = [option for name in sorted(single) for option in options[name]]
    texts["run"] = f"# Options of a run\n\n{_block('distill-run task=rte method=alp seed=1')}\n\n{_table(run)}\n"
    texts["subcommands"] = _subcommands()
    return texts


def _block(command: str) -> str:
    return f"```text\n{command}\n```"


def _group_page(name: str, options: list[FileOption], is_group: bool) -> str:
    files = _choices(config_folder() / name) if is_group else []
    choices = [file.relative_to(config_folder() / name).with_suffix("").as_posix() for file in files]
    text = [f"# `{name}`", "", _block(_command(name, options, choices)), ""]
    schemas = {prefix: schema for prefix, schema in SCHEMAS.items() if prefix.partition(".")[0] == name}
    patterns = {key: words for key, words in PARTS.items() if key.partition(".")[0] in _names(name)}
    if name == "task":
        text += ["## `task.*`", "", _task_types(), ""]
    for prefix, schema in schemas.items():
        if "(" not in prefix:
            text += [f"## `{prefix}`", "", _fields(prefix.removesuffix("*"), schema), ""]
    if patterns:
        rows = [(f"`{key}`", words) for key, words in patterns.items()]
        text += ["## Options by pattern", "", markdown_table(["option", "meaning"], rows, 2), ""]
    fields = [
        f"{prefix.partition('*')[0]}{field.alias or key}"
        for prefix, schema in schemas.items()
        for key, field in schema.model_fields.items()
    ]
    if others := [option for option in options if not is_listed(option.key, [name, *fields, *patterns])]:
        text += ["## Options in the files", "", _table(others), ""]
    if name == "method":
        for term, cls in TERMS.items():
            text += [f"## `term: {term}`", "", _fields("", argument_schema(cls), described(cls)), ""]
    if files:
        rows = [(f"`{choice}`", _header(file)) for choice, file in zip(choices, files, strict=True)]
        heading = f"## Choices: `{name}=<name>`"
        text += [heading, "", markdown_table(["name", "what it is, and its source"], rows, 2), ""]
    return "\n".join(text)


def _command(name: str, options: list[FileOption], choices: list[str]) -> str:
    """Return a command that prints the group of a run which has it, or a plan if the group sets options of others."""
    if name == "frontier" or (choices and not options) or name == "sweep":
        return f"distill-run {'sweep=frontier' if name == 'frontier' else f'{name}={choices[-1]}'} plan=true"
    config = yaml.safe_load((config_folder() / "config.yaml").read_text(encoding="utf-8"))
    defaults = {key: value for entry in config["defaults"] if isinstance(entry, dict) for key, value in entry.items()}
    setter = options[0].choice if options else "config.yaml"
    choice = f"{name}={defaults[name]}" if name in defaults else setter if setter.startswith("method=") else ""
    return f"distill-run {choice or 'task=rte method=alp'} --cfg job --package {name}"


def _names(group: str) -> tuple[str, ...]:
    return (group, "template") if group == "stages" else (group,)


def _task_types() -> str:
    """Return one table for all task types; an option that differs between them has a row for each form."""
    types: dict[tuple[str, str, str], list[str]] = {}
    for type_name, schema in TASK_TYPES.items():
        meanings = described(schema)
        for name, field in schema.model_fields.items():
            row = f"`task.{field.alias or name}`", _default(field), _cell(meanings.get(name, ""))
            types.setdefault(row, []).append(type_name)
    keys = sorted(types, key=lambda row: [*dict.fromkeys(name for name, *_ in types)].index(row[0]))
    rows = [(row[0], "all" if len(types[row]) == len(TASK_TYPES) else ", ".join(types[row]), *row[1:]) for row in keys]
    return markdown_table(["option", "task types", "default", "meaning"], rows, 4)


def is_listed(key: str, rows: Iterable[str]) -> bool:
    """Return whether a row of a page stands for a key: as itself, as a pattern, or as the mapping that holds it."""
    return any(re.fullmatch(pattern_of(row), key) for row in rows)


def pattern_of(row: str) -> str:
    """Return the regular expression of the keys that a row stands for, the group's own name for itself alone."""
    pattern = re.sub(r"<\w+>", r"[^.]+", re.escape(row))
    return pattern + (r"(\..*)?" if "." in row else "")


def _choices(group: Path) -> list[Path]:
    return sorted(group.rglob("[!_]*.yaml"))


def _table(options: list[FileOption]) -> str:
    """Return a row for each key: the value and the comment of the file that says most, and the files that set it."""
    by_key: dict[str, list[FileOption]] = {}
    for option in options:
        by_key.setdefault(option.key, []).append(option)
    rows = []
    for key, of_key in by_key.items():
        best = max(of_key, key=lambda option: (bool(option.comment), not option.choice.startswith("experiment")))
        choices = [f"`{option.choice}`" for option in of_key]
        setters = ", ".join(choices) if len(choices) < 4 else f"{choices[0]} and {len(choices) - 1} others"
        rows.append((f"`{key}`", f"`{best.value}`", _cell(best.comment), setters))
    return markdown_table(["option", "value", "meaning", "set by"], rows, 4)


def _fields(prefix: str, schema: type[BaseModel], meanings: dict[str, str] | None = None) -> str:
    meanings = meanings or described(schema)
    rows = [
        (f"`{prefix}{field.alias or name}`", _default(field), _cell(meanings.get(name, "")))
        for name, field in schema.model_fields.items()
    ]
    return markdown_table(["option", "default", "meaning"], rows, 3) if rows else "No arguments."


def _default(field: Any) -> str:
    if field.default is PydanticUndefined and not field.default_factory:
        return "required"
    value = field.default_factory() if field.default_factory else field.default
    if value == {}:
        return "`{}`"
    return f"`{format_value(value)}`" if isinstance(value, str | int | float | list | tuple | None) else "its own table"


def described(cls: type) -> dict[str, str]:
    """Return the meaning of each field or argument, from the docstrings of a class and its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE):
            for names, words in re.findall(r"^ {4}([\w, ]+): ((?:.*\n?)(?: {8}.*\n?)*)", section, re.MULTILINE):
                meanings |= dict.fromkeys(re.split(r",\s*", names), " ".join(words.split()))
    return meanings


def _header(file: Path) -> str:
    """Return the comment at the top of a file without its commands, its costs and its expected scores."""
    lines = [
        line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    text = " ".join(line for line in lines if not line.startswith(("@package", "distill-run", "Command:", "->")))
    parts = re.split(r"(?=\b(?:Source|Runs|Hours|Expected|Command): )", text)
    if file.relative_to(config_folder()).parts[0] in ("sweep", "experiment"):  # the papers' pages have the rest
        parts[0] = re.split(r"(?<=[a-z)\d]\.) (?=[A-Z\d])", parts[0])[0]
    return _cell(" ".join(part.strip() for part in parts if not re.match("(Runs|Hours|Expected|Command): ", part)))


def _subcommands() -> str:
    text = ["# Subcommands", "", _block("distill-run table --help"), ""]
    for name in SUBCOMMANDS:
        parser = parser_of(name)
        text += [f"## `distill-run {name}`", "", f"{parser.description}", "", _block(parser.format_usage().strip()), ""]
        rows = [
            (f"`{', '.join(action.option_strings) or action.metavar or action.dest}`", _cell(_help(parser, action)))
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        text += [markdown_table(["option", "meaning"], rows, 2), "", _block(parser.epilog or ""), ""]
    return "\n".join(text)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the words that ``--help`` prints about an option, with its choices."""
    words = parser._get_formatter()._expand_help(action) if action.help else ""
    choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
    return "; ".join(part for part in (words, choices) if part)


def _cell(text: str) -> str:
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _write(_app: Any) -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for file in PAGES.glob("*.md"):
        if file.stem not in texts:
            file.unlink()
    for name, text in texts.items():
        target = PAGES / f"{name}.md"
        if not target.exists() or target.read_text(encoding="utf-8") != text:  # an equal page is not built again
            target.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
