"""``docs/assumptions.md``: every assumption that the package declares, listed by option."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import yaml
from pydantic import BaseModel

from distill_runner.common.errors import format_value
from distill_runner.common.schema import ANY_VALUE, Assumption
from distill_runner.common.terminal import markdown_table
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import DECLARING
from distill_runner.datasets.corpora import Corpus
from distill_runner.methods.config import TERMS, argument_schema
from distill_runner.methods.hidden_states import Attention
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.schedules import CheckpointSchedule, LayerSchedule
from distill_runner.models.config import ModelConfig
from distill_runner.pipeline.config import StageConfig
from distill_runner.tasks import TASK_TYPES
from distill_runner.training.config import Optim

PAGE = """\
# Assumptions: what the papers leave open

```sh
distill-run task=rte method=alp plan=true    # lists those of a run
```

An assumption is the choice that this program makes when a paper leaves something open.
Every run lists those that apply to it, with their values, in `result.json` (`assumptions`).
`python docs/_ext/assumptions_page.py` prints this page.

## Options

{options}

## Configuration files

{files}
"""

REFERENCE = "${"
VALUE_IN_TEXT = r"\$\{(?:recipe:)?([\w.]+)[^}]*\}"
"""Regular expression for a value that a text takes from the configuration; its group is the name of the option."""


def schema_assumptions(schema: type[BaseModel]) -> list[tuple[str, Assumption]]:
    """Return the assumptions of a schema's own options, each with its option."""
    return [
        (name, assumption)
        for name, field in schema.model_fields.items()
        for assumption in field.metadata
        if isinstance(assumption, Assumption)
    ]


def parts() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every schema that may declare assumptions, with the name under which its options are shown."""
    schemas: list[tuple[str, type[BaseModel]]] = [
        ("stages.<stage>", StageConfig),
        ("stages.<stage>.model", ModelConfig),
        ("optim", Optim),
        ("corpus", Corpus),
        *task_parts(),
        ("mapping", LayerMapping),
        ("attention", Attention),
        ("schedule", LayerSchedule),
        ("route", CheckpointSchedule),
    ]
    yield from schemas
    for name, term in TERMS.items():
        yield name, argument_schema(term)


def task_parts() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the task types and the schemas nested in them, with the name under which their options are shown."""
    for schema in TASK_TYPES.values():
        yield "task", schema
        for field, info in schema.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield f"task.{field}", info.annotation


def page() -> str:
    """Return the text of the page."""
    rows = []
    for name, schema in parts():
        for option, assumption in schema_assumptions(schema):
            key = f"{name}.{option}" + ("" if assumption.value is ANY_VALUE else f"={format_value(assumption.value)}")
            rows.append((f"`{key}`", f"{assumption.text} ({assumption.source})"))
    options = markdown_table(["option", "assumption"], _together(rows), text_columns=2)
    files = markdown_table(["choice: option", "assumption"], _together(sorted(_of_files())), text_columns=2)
    return PAGE.format(options=options, files=files)


def _together(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return the rows, those that differ in their first cell alone as one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *others in rows:
        names.setdefault(tuple(others), []).append(name)
    return [[", ".join(dict.fromkeys(of_row)), *others] for others, of_row in names.items()]


def _of_files() -> Iterator[list[str]]:
    """Yield table rows for the assumptions that configuration files declare."""
    for file in sorted(config_folder().rglob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        choice = f"{file.parent.relative_to(config_folder()).as_posix()}={file.stem}"
        for part in (content, *(content.get(name) for name in DECLARING)):
            for key, assumption in part.get("assumptions", {}).items() if isinstance(part, Mapping) else ():
                entry = assumption if isinstance(assumption, Mapping) else {"text": assumption}
                value = entry.get("value", REFERENCE)  # a reference is the value that the file itself gives the option
                option = key if REFERENCE in str(value) else f"{key}={format_value(value)}"
                yield [f"`{choice}`: `{option}`", re.sub(VALUE_IN_TEXT, r"`\1`", entry["text"])]


if __name__ == "__main__":
    print(page(), end="")
