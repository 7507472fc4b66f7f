"""Write the configuration reference from the schemas and from `conf/` each time the site is built."""

import inspect
import re
from pathlib import Path
from typing import Any

from assumptions_page import task_parts
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from distill_runner.common.errors import format_value
from distill_runner.compose.folders import config_folder
from distill_runner.datasets.corpora import Corpus, CorpusPart, TransferSet
from distill_runner.deploy.frontier_sweep import Frontier
from distill_runner.methods.hidden_states import Attention
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.schedules import CheckpointSchedule, LayerSchedule
from distill_runner.models.config import ModelConfig, ZeroShot
from distill_runner.pipeline.config import PredictionSource, StageConfig, StoreConfig
from distill_runner.sweeping.points import SweepConfig
from distill_runner.tasks import TASK_TYPES
from distill_runner.tracking.trackers import TrackerConfig
from distill_runner.training.config import Optim, Runtime

SCHEMAS: dict[str, type[BaseModel]] = {
    **{f"task.* (type {name})": schema for name, schema in TASK_TYPES.items()},
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
    "tracker.*": TrackerConfig,
    "store.*": StoreConfig,
    "sweep.*": SweepConfig,
    "frontier.*": Frontier,
    "stages.<name>.*": StageConfig,
    "stages.<name>.model.*": ModelConfig,
    "teacher.zero_shot.*": ZeroShot,
    "stages.<name>.prediction_source.*": PredictionSource,
}
"""Schema by the part of the configuration that it checks, as typed on the command line."""


def reference() -> str:
    """Return the page as Markdown."""
    parts = ["# Configuration reference", "", INTRODUCTION, "", "## Options", ""]
    for prefix, schema in SCHEMAS.items():
        parts += [f"### `{prefix}`", "", *_fields(schema), ""]
    parts += ["## Groups", "", "A choice is one file in `conf/`: `<group>=<name>`.", ""]
    folder = config_folder()
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("hydra", "sweep")):
        rows = [f"| `{file.relative_to(group).with_suffix('')}` | {_header(file)} |" for file in _choices(group)]
        parts += [f"### `{group.name}=`", "", "| name | what it is |", "| --- | --- |", *rows, ""]
    return "\n".join(parts)


INTRODUCTION = """This page is generated from the schemas and from `conf/`.
`distill-run <overrides> --cfg job` prints the full configuration of a run."""


def _choices(group: Path) -> list[Path]:
    return sorted(group.rglob("[!_]*.yaml"))


def _fields(schema: type[BaseModel]) -> list[str]:
    meanings = described(schema)
    rows = []
    for name, field in schema.model_fields.items():
        default = "required" if field.default is PydanticUndefined and not field.default_factory else _default(field)
        rows.append(f"| `{field.alias or name}` | {default} | {_cell(meanings.get(name, ''))} |")
    return ["| option | default | meaning |", "| --- | --- | --- |", *rows]


def _default(field: Any) -> str:
    value = field.default_factory() if field.default_factory else field.default
    if value == {}:
        return "`{}`"
    return f"`{format_value(value) if isinstance(value, str | int | float | list | tuple | None) else 'see below'}`"


def described(schema: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field, from the docstrings of a schema and its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        text = inspect.cleandoc(base.__doc__ or "") if issubclass(base, BaseModel) else ""
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE):
            for names, words in re.findall(r"^ {4}([\w, ]+): ((?:.*\n?)(?: {8}.*\n?)*)", section, re.MULTILINE):
                meanings |= dict.fromkeys(re.split(r",\s*", names), " ".join(words.split()))
    return meanings


def _header(file: Path) -> str:
    """Return the comment at the top of a file without its commands."""
    lines = [
        line.removeprefix("#").strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    first = " ".join(line for line in lines if not line.startswith(("@package", "distill-run", "Command:", "->")))
    return _cell(first.split("Expected:")[0].strip())


def _cell(text: str) -> str:
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _write(_app: Any) -> None:
    target = Path(__file__).parents[1] / "reference" / "configuration.md"
    target.parent.mkdir(exist_ok=True)
    text = reference()
    if not target.exists() or target.read_text(encoding="utf-8") != text:  # an equal page is not built again
        target.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
