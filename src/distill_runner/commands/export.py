"""``distill-run export``: write a model as ONNX, check it against torch, score and time it, and test it by a margin."""

import logging
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from distill_runner.commands.parser import task_options
from distill_runner.common.errors import UserError, quantity
from distill_runner.common.library_switches import limit_threads, quiet_transformers
from distill_runner.datasets.tokenization import save_tokenizer
from distill_runner.deploy import measure
from distill_runner.deploy.folder import ModelFolder
from distill_runner.deploy.measure import BATCH, EXACT, INT8, ModelForm
from distill_runner.deploy.onnx import FOLDER, require_onnx, versions
from distill_runner.deploy.serving import write_service
from distill_runner.models.sources import resolve_source
from distill_runner.pipeline.status import write_json
from distill_runner.report.card import CARD
from distill_runner.training.config import MAX_THREADS

EXPORTS = Path("outputs/exports")
"""Folder of the exports of models that others trained."""


def export(options: Namespace) -> int:
    """Write ``onnx/``, ``serve.py`` and the card's section on deployment, and return the exit code.

    Those of a run's student are beside it, those of another model in a folder of their own. ``deploy.json`` has the
    record of what was measured, and how.

    Returns:
        1 if it is not shown that int8 is within the margin; else 0.
    Raises:
        UserError: there is no such model, a package is missing, or ONNX gives other outputs than torch.
    """
    if not 1 <= options.threads <= MAX_THREADS:
        raise UserError("--threads", options.threads, f"must be between 1 and {MAX_THREADS}")
    require_onnx()
    quiet_transformers()
    logging.getLogger("distill_runner.deploy").setLevel(logging.INFO)
    if not Path(options.folder, "config.yaml").is_file() and options.data is None:
        problem = "names no labeled examples to score the model on, which a model without a run needs"
        raise UserError("--data", None, problem, "Name a file: --data examples.csv")
    model = ModelFolder.read(options.folder, options.data, task_options(options.overrides))
    if options.out and (model.run or options.out.is_file()):
        problem = "is not read, since the files of a run are in its folder" if model.run else "is a file"
        raise UserError("--out", options.out, problem, "Leave it out, or name the folder of a model and a new one.")
    started, task, own = time.time(), model.task, "model" if model.run is None else "student"
    limit_threads(options.threads)
    target = model.model if model.run else options.out or EXPORTS / Path(options.folder.partition("@")[0]).name
    if model.run is None:
        _copy(model, target)
    with TemporaryDirectory() as scratch:
        teacher = _teacher(model.run) if model.run else None
        models = {"teacher": (teacher, Path(scratch))} if teacher else {}
        models[own] = (model.model, target)
        rows, machine = measure.evaluate(
            models, task, model.head, options.threads, options.examples, options.int8, options.within
        )
    for file in (target / FOLDER).iterdir():
        if file.stat().st_mtime < started:  # of an earlier export, which had other forms or an earlier student
            file.unlink()
    forms = {row.form: row for row in rows if row.model == own and row.form in (EXACT, INT8)}
    served = INT8 if INT8 in forms and forms[INT8].is_within else EXACT
    circumstances = f"{measure.in_words(machine)}; one example at a time (p50, p95, p99) and batches of {BATCH}, of "
    circumstances += f"{machine['timed']} of {quantity(machine['examples'], 'example', ',')}; "
    circumstances += "the forms take turns; tokenizing is not counted."
    conclusions = [_conclusion(row, options.within, machine["examples"]) for row in forms.values()]
    record = {"margin": options.within, "served": served, "machine": machine, "versions": versions()}
    write_json((model.run or target) / "deploy.json", {**record, "rows": [asdict(row) for row in rows]})
    tables = [measure.table(rows, task.metrics[0], task.agreement_name)]
    tables += [measure.label_table(row) for row in forms.values() if any(label.test for label in row.labels.values())]
    (file,) = [file for file in (target / FOLDER).iterdir() if (file.stem == "model") == (served == EXACT)]
    write_service(target, file, task, options.threads, [*tables, *conclusions, circumstances], options.license)
    print(*tables, *conclusions, circumstances, f"written: {target}", sep="\n")
    return 0 if options.within is None or all(row.is_within for row in forms.values()) else 1


def _copy(model: ModelFolder, target: Path) -> None:
    """Write what an exported model needs beside its ONNX files: configuration, tokenizer and card."""
    source = resolve_source(str(model.model))
    target.mkdir(parents=True, exist_ok=True)
    card = model.model / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {Path(model.name).name}\n"
    (target / CARD).write_text(text, encoding="utf-8")
    source.config().save_pretrained(target)
    save_tokenizer(source.tokenizer(), target, model.task.num_positions)


def _conclusion(row: ModelForm, margin: float | None, examples: int) -> str:
    """Return in words whether a form is within the margin and, if that is not shown, what is missing."""
    if row.form == EXACT:
        return f"{row.form}: the outputs of torch, up to {row.difference:.1e}."
    if margin is None:
        return f"{row.form}: not tested, without a margin (--within)."
    limit = quantity(margin, "point", "g")
    if row.test is None or row.p is None:
        return f"{row.form}: by this metric, there is no test of a margin."
    text, change = f"{row.form}: {100 * row.test.difference:+.2f} to torch", 100 * row.test.difference
    if row.is_within:
        return f"{text}, within {limit} (p = {row.p:.2g}, one-sided)."
    if change <= -margin:
        return f"{text}, not within {limit}."
    hint = "too few examples differ to test"
    if needed := measure.examples_needed(row.p, examples):
        hint = f"about {needed:,} examples, of {examples:,} now, would show it"
    return f"{text}, not shown to be within {limit} (p = {row.p:.2g}): {hint}."


def _teacher(run: Path) -> Path | None:
    """Return the folder of the teacher's model; None if the model is not available."""
    from distill_runner.analysis.finished_run import FinishedRun

    try:
        finished = FinishedRun.read(run)
        if finished.teacher.config.prediction_source is not None:
            return None  # known only by its predictions
        return finished.pipeline.build(finished.teacher) / "model"
    except UserError as error:
        print(f"without the teacher: {error}", file=sys.stderr)
        return None
