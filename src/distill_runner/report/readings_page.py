"""Generate ``docs/readings.md``: every reading that the package declares, listed by option."""

from collections.abc import Iterator, Mapping

import yaml
from pydantic import BaseModel

from distill_runner.common.errors import as_typed
from distill_runner.common.readings import EVERY, declared
from distill_runner.compose.folders import config_folder
from distill_runner.compose.recipe import DECLARING
from distill_runner.datasets.corpora import Corpus
from distill_runner.kinds.questions.losses import Spans
from distill_runner.kinds.questions.windowing import Windowing
from distill_runner.methods.checkpoint_schedule import CheckpointSchedule
from distill_runner.methods.config import arguments_of
from distill_runner.methods.layer_mapping import Attention, LayerMapping
from distill_runner.methods.layer_schedule import LayerSchedule
from distill_runner.methods.outputs import Score
from distill_runner.methods.terms import TERMS
from distill_runner.models.config import ModelConfig
from distill_runner.pipeline.config import StageConfig
from distill_runner.training.config import Optim

HEAD = """\
# Readings: where a paper is silent

A reading is the choice that this program makes where a paper leaves something open. It is declared beside its option.
Every run lists the readings that apply to it, with their values, in `result.json` (`readings`) and under `plan=true`.
`plan=true` also shows the run's settings beside those that the recipe's paper names.
`python -m distill_runner.report.readings_page` makes this page.

## Options

| option | default | reading | source |
| --- | --- | --- | --- |
"""


CHOICES = """
## Configuration files

| choice | option | reading |
| --- | --- | --- |
"""


def parts() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every schema that may declare readings, with the name under which its options are shown."""
    yield from (
        ("stages.<stage>", StageConfig),
        ("stages.<stage>.model", ModelConfig),
        ("optim", Optim),
        ("corpus", Corpus),
        ("task.windowing", Windowing),
        ("mapping", LayerMapping),
        ("attention", Attention),
        ("schedule", LayerSchedule),
        ("route", CheckpointSchedule),
    )
    for name, term in TERMS.items():
        yield name, arguments_of(term)


def page() -> str:
    """Return the text of the page."""
    rows = []
    for name, schema in parts():
        for option, default, reading in declared(schema):
            key = f"{name}.{option}" + ("" if reading.value is EVERY else f"={as_typed(reading.value)}")
            rows.append(f"| `{key}` | {as_typed(default)} | {reading.text} | {reading.source} |")
    for outputs in (Score, Spans):
        for term, reading in outputs.readings.items():
            rows.append(f"| `{term}` of {outputs.__name__.lower()} | | {reading.text} | {reading.source} |")
    return HEAD + "\n".join(rows) + "\n" + CHOICES + "\n".join(sorted(_of_files())) + "\n"


def _of_files() -> Iterator[str]:
    """Yield table rows for the readings that configuration files declare."""
    for file in sorted(config_folder().rglob("*.yaml")):
        content = yaml.safe_load(file.read_text()) or {}
        choice = f"{file.parent.relative_to(config_folder()).as_posix()}={file.stem}"
        found = [content, *(content.get(part) for part in DECLARING)]
        for part in found:
            for key, reading in part.get("readings", {}).items() if isinstance(part, Mapping) else ():
                meant = reading if isinstance(reading, Mapping) else {"text": reading}
                shown = f"{key}={as_typed(meant['value'])}" if "value" in meant else key
                yield f"| `{choice}` | `{shown}` | {meant['text']} |"


if __name__ == "__main__":
    print(page(), end="")
