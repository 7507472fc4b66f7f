"""The account of a run: what its stages read, in a few lines, each from a function that ``account_of_run`` calls.

Data are accounted for when they are tokenized into the store. A plan, which tokenizes nothing, reads the data on this
machine and tokenizes the first examples.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

import numpy as np

from distill_runner.common.errors import UserError, quantity, short_list
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.readers.files import unread_siblings
from distill_runner.datasets.readers.hub import is_downloaded
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.models.metadata import MODULES
from distill_runner.models.sources import read_config
from distill_runner.models.vectors import source_folder
from distill_runner.models.weights import WeightsReport
from distill_runner.pipeline.inputs import StageInputs, account_of_examples, read_examples, weights_report
from distill_runner.pipeline.stages import METRICS_FILE, Stage, TrimmedTokenizer
from distill_runner.tasks.columns import percent
from distill_runner.tasks.scores import TRANSFER
from distill_runner.tasks.split_account import SplitAccount, data_line, length_counts, lengths_line
from distill_runner.tasks.task_splits import HELD_OUT

log = logging.getLogger(__name__)

SAMPLE = 1000
"""Examples that a plan tokenizes to tell their lengths."""


def log_account(lines: Iterable[AccountLine]) -> None:
    """Print the account, and each of its warnings."""
    for line in lines:
        log.info("%s", line)
        for warning in line.warnings:
            log.warning("warning: %s", warning)


def task_lines(stage: Stage, inputs: StageInputs) -> Iterator[AccountLine]:
    """Yield the lines on the data of the stage's task: the splits that it trains on and is scored on."""
    if (task := stage.config.task) is None:
        return
    accounts, hashes = dict[str, SplitAccount](), dict[str, np.ndarray]()
    splits = {"train": stage.train_split, **task.validation, **task.test}
    texts = dict[str, list[list[str]]]()

    def text_of(name: str, row: int) -> str:
        with suppress(UserError), recorded_tables():  # the data of stored splits may be gone
            if name not in texts:
                texts[name] = [*read_examples(stage, splits[name]).texts]
            return shorten(" / ".join(column[row] for column in texts[name]), 100, placeholder=" ...")
        return f"example {row} of {name}"

    for name, split in splits.items():
        stored = inputs.account(stage, split)
        if stored is None and (absent := _not_downloaded(stage, split)):
            yield AccountLine("data", f"{absent} is not downloaded yet")
            return
        account, own_hashes = stored or _read_split(stage, split, inputs)
        accounts[name] = account
        if own_hashes is not None:
            hashes[name] = own_hashes
    line = data_line(accounts, hashes, "text" if task.tokenized else "image", text_of)
    part = f"{percent(task.hold_out)} of the training examples select the epoch" if task.select_on == HELD_OUT else ""
    subset = f"{percent(stage.share)} of the training examples are trained on" if stage.share < 1 else ""
    line = replace(line, text="; ".join(filter(None, [line.text, part, subset])))
    siblings = unread_siblings(task, [r.name for own in accounts.values() if own.split != TRANSFER for r in own.files])
    yield replace(line, warnings=(*line.warnings, f"not read: {', '.join(siblings)}")) if siblings else line
    if (lengths := lengths_line(accounts)) is not None:
        yield lengths


def _not_downloaded(stage: Stage, split: str) -> str | None:
    """Return the name of what has to be downloaded before a split can be read; None if nothing has."""
    task, transfer = stage.task, stage.config.transfer
    if split != TRANSFER or transfer is None:
        return None if is_downloaded(task, split) else f"{task.dataset} on the hub: {split}"
    absent = [part.dataset for part in transfer.parts.values() if not is_downloaded(part, part.train)]
    return f"{absent[0]} on the hub: transfer set {transfer.name}" if absent else None


def _read_split(stage: Stage, split: str, inputs: StageInputs) -> tuple[SplitAccount, np.ndarray | None]:
    """Return the account of a split and the hashes of its examples from the data, without storing anything."""
    task = stage.task
    with recorded_tables() as tables:
        examples = read_examples(stage, split)
        rows = len(examples)  # questions are read only now
        account = account_of_examples(stage, split, examples, tables)
    account.rows = rows
    if task.tokenized and (tokenizer := inputs.tokenizer(stage.with_full_vocabulary)) is not None:
        with TemporaryDirectory() as folder:
            cut = task.write(Path(folder), examples.first(SAMPLE), tokenizer)
            lengths = np.array(task.open(Path(folder)).teacher_inputs.lengths)
        account.lengths = length_counts(lengths, cut, task.num_positions, is_sample=rows > SAMPLE)
    return account, task.hashes(examples, None)


def example_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the weights of a stage's training examples, if they have any."""
    task = part.config.task
    if task is None or task.weight_column is None or part.config.prediction_source is not None:
        return None
    if _not_downloaded(part, task.train):
        return None
    account, _ = inputs.account(part, task.train) or _read_split(part, task.train, inputs)
    low, high, effective = account.weights
    others = [name for name in part.config.method.terms if name not in part.config.method.weighted_terms]
    text = f"{part.name}: weights of {task.weight_column}, {low:g} to {high:g}, as {effective:,.0f} of"
    text += f" {quantity(account.rows, 'example', ',')} with equal weights ((sum w)^2 / sum w^2)"
    unread = f"; not in the terms {', '.join(others)}" if others else ""
    details = {"stage": part.name, "weight": task.weight_column, "effective": effective, "rows": account.rows}
    return AccountLine("examples", text + unread, (), details)


def score_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the scores in columns of the data, if there are any."""
    task, is_learned = part.config.task, part.teacher is not None and part.teacher.has_columns
    if task is None or part.has_columns or not (is_learned or task.prediction_columns):
        return None
    absent = (_not_downloaded(part, split) for split in (part.train_split, *task.validation.values()))
    if name := next(filter(None, absent), None):
        return AccountLine("scores", f"{name} is not downloaded yet")
    line = task.scores_line(part.config.transfer)
    if is_learned:
        return line
    return replace(line, warnings=(*line.warnings, "these scores are not the teacher here (teacher=labels)"))


def corpus_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the stage's corpus, if it has one that is tokenized into the store."""
    if (corpus := part.config.corpus) is None or (stored := inputs.account(part, "train")) is None:
        return None
    account, _ = stored
    files = [f"{record.name} {quantity(record.rows, 'row', ',')}" for record in account.files[:3]]
    files += [f"and {quantity(len(account.files) - 3, 'more file', ',')}"] if len(account.files) > 3 else []
    limits = {part.dataset: part.limit for part in corpus.parts.values() if part.limit}
    files += [f"at most {quantity(limit, 'document', ',')} of {name}" for name, limit in limits.items()]
    cut = f", {account.lengths['cut']:,} cut to {corpus.max_length} tokens" if account.lengths["cut"] else ""
    text = f"{', '.join(files) or account.origin}; {account.rows:,} training examples{cut}"
    return AccountLine("corpus", f"{corpus.name}: {text}", tuple(account.warnings), {"train": asdict(account)})


def weight_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the model source whose weights the stage starts from, if there is one."""
    source = part.model_source
    if source is None or part.config.model.layers == "random":
        return None
    name = f"{part.name} {source.name}" + (f" merged into {source.base.name}" if source.base else "")
    file = inputs.store.path(part.spec) / METRICS_FILE  # of a stage that was built, whose source may be gone
    entry = json.loads(file.read_text(encoding="utf-8")).get("weights") if inputs.store.has(part.spec) else None
    if (report := WeightsReport.model_validate(entry) if entry else weights_report(part)) is None:
        unknown = "not on this machine yet" if source.commit else "compared when they are loaded"
        return AccountLine("weights", f"{name}: {unknown}")
    warnings = (f"{name}: {len(report.missing)} tensors are random",) if report.fails else ()
    is_read = part.head.vectors is not None or not (source.folder / MODULES).is_file()
    unread = "" if is_read else "; its pooling for vectors (modules.json) is not read"
    unread += f"; {quantity(depth, 'layer')} kept" if (depth := part.config.model.num_layers) else ""
    details = {"stage": part.name, **report.model_dump(mode="json")}
    return AccountLine("weights", f"{name}: {report}{unread}", warnings, details)


def folder_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the folder of the stage's model, if it says how texts become vectors, or has unread keys."""
    if (source := part.model_source) is None:
        return None
    texts, unread = list[str](), source.unread_keys
    vectors, folder = part.head.vectors, source_folder(source) if part.head.vectors else None
    if vectors is not None and folder is not None:
        own = [f"{name} {text!r}" for name, text in vectors.prompts.items() if text]
        rest = [f"{name} {text!r}" for name, text in folder.prompts.items() if text not in vectors.prompts.values()]
        texts += [f"vectors compared by {vectors.similarity}", f"prompts: {', '.join(own) or 'none'}"]
        if folder.similarity != vectors.similarity:
            texts.append(f"the folder compares them by {folder.similarity}")
        if rest:
            texts.append(f"prompts of the folder without use: {', '.join(rest)}")
        if folder.max_length is not None and folder.max_length > vectors.max_length:
            texts.append(f"texts cut at {vectors.max_length} tokens, in the folder at {folder.max_length}")
        unread = [*unread, *folder.unread_keys]
    texts += [f"not read: {short_list(unread)}"] if unread else []
    text = f"{part.name} {source.name}: {'; '.join(texts)}"
    return AccountLine("folder", text, (), {"unread": unread}) if texts else None


def label_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on which output is which class of the task, if the stage's model keeps its head.

    Raises:
        UserError: the outputs of the head are not named like the classes.
    """
    model, source, task = part.config.model, part.model_source, part.config.task
    if source is None or task is None or model.head != "keep":
        return None
    try:
        matches = part.head.output_texts(model.output_names(source.label_names, source.name) or {})
    except UserError:
        if (report := weights_report(part)) is not None and (report.new or report.fails):
            return None  # it has no head, which is said when it is loaded
        raise
    remark = "; outputs named by teacher.labels" if model.labels else ""
    kind = source.config().problem_type
    if part.head.problem_type and kind not in (None, part.head.problem_type):
        remark += f"; its problem_type {kind} is not read: the task is {part.head.problem_type}"
    pairs = [f"{name} = {text}" for name, text in zip(part.head.names or (), matches, strict=False)]
    text = f"{part.name} {source.name}: {short_list(pairs)}{remark}"
    return AccountLine("labels", text, (), {"stage": part.name}) if pairs else None


def vocabulary_line(part: Stage, inputs: StageInputs) -> AccountLine | None:
    """Return the line on the stage's vocabulary, if it is trimmed."""
    if part.config.model.vocabulary != "trim" or not isinstance(part.tokenizer, TrimmedTokenizer):
        return None
    if inputs.store.find(part.tokenizer.spec) is None:
        text = "trimmed to the tokens of its training texts, which are counted when these are tokenized"
        return AccountLine("tokens", f"{part.name}: {text}")
    rows, total = len(inputs.trimmed(part.tokenizer)[1]), part.shape.vocab_size
    config = read_config(part.root.config.model, part.root.model_source)
    removed = (total - rows) * getattr(config, "embedding_size", part.shape.width)
    texts = [f"{rows:,} of {total:,} tokens remain ({removed / 1e6:.1f}M parameters less)"]
    changed = dict[str, int]()
    for name, split in {**part.config.task.validation, **part.config.task.test}.items() if part.config.task else ():
        if (stored := inputs.account(part, split)) is not None:
            changed[name], count = stored[0].retokenized
            texts.append(f"{changed[name]:,} of {quantity(count, 'text', ',')} of {name} have other tokens")
    details = {"stage": part.name, "tokens": rows, "full": total, "parameters_removed": removed, "changed": changed}
    return AccountLine("tokens", f"{part.name}: {'; '.join(texts)}", (), details)


LINES = example_line, score_line, corpus_line, weight_line, folder_line, label_line, vocabulary_line
"""Of a stage, each by its kind of input; a new kind adds its function."""


def account_of_run(stage: Stage, inputs: StageInputs) -> list[AccountLine]:
    """Return the lines of the account of a run that ends with ``stage``; stages that read the same share a line."""
    of_parts = (line_of(part, inputs) for line_of in LINES for part in stage.in_build_order)
    lines = dict[str, AccountLine]()
    for line in (*task_lines(stage, inputs), *filter(None, of_parts)):
        lines.setdefault(str(line), line)
    return [*lines.values()]
