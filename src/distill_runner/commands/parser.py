"""Options of the subcommands of ``distill-run``. The module of a subcommand is imported only when it runs."""

import argparse
import inspect
import os
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from distill_runner.common.errors import UserError, command, suggestion

RUNS = Path("outputs/runs")
FORMATS = ("terminal", "markdown", "csv", "latex", "html", "picture")
_AXES = ("size", "width", "transfer_size", "transfer", "share", "updates")
_ANALYSES = ("agreement", "samples", "history", "attention", "alpha", "states")
_MODEL = "folder of a finished run; or folder or hub id of a model of transformers or sentence-transformers"


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ``UserError`` instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, None, message, f"See {self.prog} --help.")


SUBCOMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {}
"""By name: module in ``distill_runner.commands`` and function in it, and what adds the options to a parser.

The function takes the parsed options and returns the exit code, or None for 0. The docstring of the other one is the
help of the subcommand: what it does in one line, and notes.
"""


def _subcommand(function: str) -> Callable[[Callable[[Parser], None]], None]:
    """Register the decorated function, ``_<name>``, as what adds the options of the subcommand ``<name>``."""

    def register(add_options: Callable[[Parser], None]) -> None:
        SUBCOMMANDS[add_options.__name__[1:]] = function, add_options

    return register


@_subcommand("table:show_table")
def _table(parser: Parser) -> None:
    """Print the table of all runs, at any time.

    examples:
      distill-run table --task rte mrpc --format latex --out table.tex
      distill-run table --method alp rkd --compare alp rkd
    """
    _add_folders(parser)
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: %(default)s")
    _add_out(parser, "file to write instead of standard output")
    _add_filters(parser)
    compare = "test the first row, or method, against the others; may be repeated"
    parser.add_argument("--compare", nargs="+", action="append", default=[], metavar="ROW", help=compare)
    _add_margin(parser)
    parser.add_argument("--picture", nargs="+", type=Path, default=[], metavar="FILE", help="pictures in the HTML page")


@_subcommand("table:show_comparison")
def _compare(parser: Parser) -> None:
    """Test the first row of the table, or the first file of predictions, against each of the others.

    examples:
      distill-run compare alp nkd rkd pkd ckd             four tests, with Holm's correction
      distill-run compare alp rkd --margin 0.5            better, worse, the same within 0.5 points, or undecided
      distill-run compare alp rkd --looks 2               two more seeds were run after a look at three
      distill-run compare --predictions a.csv b.csv --gold gold.csv --margin 1
      distill-run compare --predictions rkd=r1.csv,r2.csv base=b1.csv,b2.csv --gold gold.csv
    """
    parser.add_argument("rows", nargs="*", metavar="ROW", help="row of the table, or method that has only one row")
    files = "files of predictions of any program, a method each; several files of one are its seeds: rkd=a1.csv,a2.csv"
    parser.add_argument("--predictions", nargs="+", metavar="FILE", help=files)
    parser.add_argument("--gold", type=Path, metavar="FILE", help="with --predictions: labels of the same examples")
    parser.add_argument("--metric", help="with --predictions: score (default: the usual one of the task type)")
    parser.add_argument("--type", help="with --predictions: task type, if the labels may be of two")
    classes = "with --predictions: classes in the order of their numbers, the positive one second: no,yes"
    parser.add_argument("--labels", default="", help=classes)
    parser.add_argument("--runs", nargs="+", type=Path, default=[RUNS], help=f"folders of runs (default: {RUNS})")
    _add_filters(parser)
    _add_margin(parser)
    looks = "how often the seeds so far were tested, this time included, if some were added after a look (default: 1)"
    parser.add_argument("--looks", type=_positive("--looks", int), default=1, metavar="N", help=looks)
    formats = ("terminal", "markdown", "json", "picture")
    picture = "picture: a forest plot of the differences, with the margin (default: %(default)s)"
    parser.add_argument("--format", choices=formats, default="terminal", help=picture)
    _add_out(parser, "file to write instead of standard output")


@_subcommand("table:draw_curves")
def _curves(parser: Parser) -> None:
    """Draw scores against the size of the student or of the data.

    The figures are those of the well-read students (Turc et al. 2019, Figures 5 to 10) and of the internal
    representations (Aguilar et al. 2020, Figures 2, 3 and 6 to 9).

    example:
      distill-run curves --by size --task mnli --out figure.png
    """
    _add_folders(parser)
    parser.add_argument("--by", choices=_AXES, default="size", help="what the axis shows (default: %(default)s)")
    _add_out(parser, "file of the picture: .png, .pdf or .svg", required=True)
    parser.add_argument("--task", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--order", nargs="+", default=[], metavar="VALUE", help="values that come first on the axis")


@_subcommand("analyze:analyze")
def _analyze(parser: Parser) -> None:
    """Compare predictions, attention and states of students with their teacher.

    analyses:
      agreement  how often teacher and student are right or wrong (a table)
      samples    examples that the teacher predicts correctly and a student does not (a table)
      history    score per epoch, and the epochs at which a schedule moved on from a layer (history.png)
      attention  attention maps of one example (attention.png)
      alpha      ALP-KD's weights of the teacher's layers (alpha.png)
      states     [CLS] states of students and teacher (states.png)

    Models and predictions are read from the store of the runs. All runs must have the same task and the same teacher.

    example:
      distill-run analyze states outputs/runs/sst2-pkd-0123456789ab outputs/runs/sst2-alp-0123456789ab --layers 2 3
    """
    parser.add_argument("what", choices=_ANALYSES, help="kind of analysis; see below")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the picture: .png, .pdf or .svg")
    parser.add_argument("--example", type=int, default=0, help="attention: example of the validation split, from 0")
    parser.add_argument("--head", type=int, default=0, help="attention: attention head, counted from 0")
    layers = "alpha, states: student layers (default: 1; all with a teacher layer)"
    parser.add_argument("--layers", type=int, nargs="+", help=layers)
    samples = "samples, alpha, states: number of examples (default: 4, 10, 100)"
    parser.add_argument("--samples", type=_positive("--samples", int), help=samples)


@_subcommand("predict:predict")
def _predict(parser: Parser) -> None:
    """Write a model's predictions for a file: classes with probabilities, or answers.

    examples:
      distill-run predict outputs/runs/rte-alp-0123456789ab my_pairs.csv
      distill-run predict distilbert/distilbert-base-uncased-finetuned-sst-2-english new.jsonl --out predictions.csv
    """
    parser.add_argument("folder", help=_MODEL)
    formats = "CSV, TSV, JSON, JSON lines or Parquet, with the task's columns; .conll; .txt, a text a line; or images"
    parser.add_argument("file", type=Path, help=formats)
    parser.add_argument("--encoding", metavar="NAME", help="encoding of the file, such as cp1252 (default: UTF-8)")
    _add_out(parser, "CSV file to write, JSON lines or .conll for labels of words (default: standard output)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    _add_overrides(parser)


@_subcommand("predict:submit")
def _submit(parser: Parser) -> None:
    """Write students' predictions for the test sets, in the format of GLUE's leaderboard.

    For a student that answers questions, the file holds answers by question id, for the evaluation scripts of
    SQuAD and MLQA.

    example:
      distill-run submit outputs/runs/rte-alp-* outputs/runs/cola-alp-* --out submission.zip --fill
    """
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs, one for each task")
    _add_out(parser, "submission.zip, or answers.json for questions", required=True)
    parser.add_argument("--split", metavar="NAME", help="split of questions (default: the first test, else validation)")
    parser.add_argument("--fill", action="store_true", help="write constants for the tasks without a student")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")


@_subcommand("export:export")
def _export(parser: Parser) -> None:
    """Export a model to ONNX, check it against torch, and measure what each form scores and costs.

    examples:
      distill-run export outputs/runs/sst2-alp-0123456789ab --threads 4 --examples 500
      distill-run export my_model --data labeled.csv --within 1       the exit code is 1 if int8 may lose a point
    """
    parser.add_argument("folder", help=_MODEL)
    parser.add_argument("--data", type=Path, metavar="FILE", help="labeled file (default: the run's validation split)")
    limit = "test that int8 scores less than this below torch; exit code 1 if that is not shown"
    parser.add_argument("--within", type=_positive("--within", float), metavar="POINTS", help=limit)
    out = "folder of the export of a model without a run (default: outputs/exports/<name>)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=out)
    _add_overrides(parser)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch and ONNX Runtime (default: 1)")
    parser.add_argument("--examples", type=_positive("--examples", int), default=200, help="how many to time (200)")
    parser.add_argument("--no-int8", dest="int8", action="store_false", help="write float32 only, not 8 bits")
    parser.add_argument("--license", metavar="ID", help="license in the model card, by its id on the hub: apache-2.0")


@_subcommand("store:manage_store")
def _store(parser: Parser) -> None:
    """List or delete the artifacts in a store.

    examples:
      distill-run store list --kind stage --unused        list the stages that no finished run was made from
      distill-run store delete --key 1a2b --key 3c4d      delete two artifacts
      distill-run store delete --damaged --partial --yes  delete what is not complete, without asking
    A run builds missing artifacts again. The folder of a run has its own copy of the student, which stays.
    """
    parser.add_argument("action", nargs="?", choices=["list", "delete"], default="list")
    folder = os.path.expanduser(os.environ.get("DISTILL_STORE_DIR") or "outputs/store")
    parser.add_argument("--store", default=folder, help="folder of the store (default: %(default)s)")
    parser.add_argument("--kind", action="append", default=[], help="all artifacts of this kind, such as checkpoints")
    parser.add_argument("--key", action="append", default=[], help="one artifact, by the first digits of its key")
    parser.add_argument("--unused", action="store_true", help="artifacts that no finished run in --runs was made from")
    parser.add_argument("--damaged", action="store_true", help="artifacts whose files have changed")
    parser.add_argument("--partial", action="store_true", help="unfinished artifacts, with which a run may go on")
    parser.add_argument("--runs", default=str(RUNS), help="folder that holds the run folders (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


@_subcommand("dashboard:make_dashboard")
def _dashboard(parser: Parser) -> None:
    """Create a view with panels for distillation in a W&B project.

    examples:
      distill-run dashboard --project my-project --sweep alp_kd-table1-1a2b3c4d
      distill-run dashboard --print > dashboard.json
    """
    parser.add_argument("--project", default="distill-run", help="as in tracker.project (default: %(default)s)")
    parser.add_argument("--entity", help="user or team, as in tracker.entity (default: the account's own)")
    parser.add_argument("--sweep", help="show only the runs of this sweep, by the name of its folder in outputs/sweeps")
    parser.add_argument("--print", action="store_true", help="print it as JSON, without an account or network")


@_subcommand("track:track")
def _track(parser: Parser) -> None:
    """Send finished runs to W&B, TensorBoard or a tracker of a plugin.

    Curves are read from metrics.jsonl.

    example:
      distill-run track outputs/runs/* --tracker wandb --project my-project
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="folders of finished runs")
    parser.add_argument("--tracker", default="wandb", help="wandb, tensorboard or a plugin (default: wandb)")
    parser.add_argument("--project", help="as in tracker.project (default: that of the run)")
    parser.add_argument("--entity", help="user or team, as in tracker.entity (default: the account's own)")
    parser.add_argument("--group", help="as in tracker.group (default: that of the run)")


def _add_folders(parser: Parser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, default=[RUNS], help=f"folders of runs (default: {RUNS})")


def _add_overrides(parser: Parser) -> None:
    overrides = "options of the task, which replace what the folder says: task.columns=[text] task.label=topic"
    parser.add_argument("overrides", nargs="*", default=[], metavar="task.<option>=<value>", help=overrides)


def task_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of overrides of a task, nested by their keys.

    Raises:
        UserError: one is not of the form ``task.<option>=<value>``.
    """
    from omegaconf import OmegaConf

    from distill_runner.compose.command_line import parsed

    config = OmegaConf.create({"task": {}})
    for override in overrides:
        key, value = parsed(override)
        if not key.startswith("task."):
            raise UserError(override, None, "is no option of the task", "Write task.<option>=<value>.")
        OmegaConf.update(config, key, value)
    options: Any = OmegaConf.to_container(config)
    return dict(options["task"])


def _add_filters(parser: Parser) -> None:
    parser.add_argument("--task", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--method", nargs="+", metavar="METHOD", help="only these methods")
    parser.add_argument("--split", nargs="+", default=[], metavar="SETTING", help="settings that are rows: optim.lr")


def _add_margin(parser: Parser) -> None:
    margin = "also test whether rows differ by less than this: better, worse, the same, or undecided"
    parser.add_argument("--margin", type=_positive("--margin", float), metavar="POINTS", help=margin)


def _positive(option: str, number: type[int] | type[float]) -> Callable[[str], float]:
    """Return the function that reads a positive, finite number of an option."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := number(text)) < float("inf"):
                return value
        raise UserError(option, text, "must be a positive number")

    return read


def _add_out(parser: Parser, help_text: str, required: bool = False) -> None:
    def new_file(name: str) -> Path:
        path = Path(name)
        if path.is_dir() or not path.absolute().parent.is_dir():  # before any work
            raise UserError("--out", name, "is a folder" if path.is_dir() else "its folder does not exist")
        return path

    parser.add_argument("--out", type=new_file, metavar="FILE", help=help_text, required=required)


def write_file(file: Path, content: str | bytes) -> None:
    """Write the file that ``--out`` names.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError("--out", file, f"cannot be written: {error.strerror}") from error


def subcommand_of(arguments: Sequence[str]) -> str | None:
    """Return the subcommand that the first argument names; None for the arguments of a run.

    Raises:
        UserError: the first argument is a word that is not a subcommand.
    """
    if not arguments or not re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]):
        return None
    name = arguments[0]
    if name not in SUBCOMMANDS:
        problem = "is neither a subcommand nor of the form <key>=<value>"
        # Of other tools; here, training has no subcommand.
        is_word = name.lower() in {"train", "run", "fit", "distill", "finetune", "fine-tune"}
        remedy = "Leave it out: " + command("distill-run task=rte") if is_word else suggestion(name, SUBCOMMANDS)
        raise UserError(name, None, problem, remedy + " See distill-run --help.")
    return name


def parser_of(name: str) -> Parser:
    """Return the parser of a subcommand."""
    add_options = SUBCOMMANDS[name][1]
    summary, _, notes = inspect.cleandoc(add_options.__doc__ or "").partition("\n\n")
    parser = Parser(f"distill-run {name}", None, summary, notes, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    return parser


def run_subcommand(name: str, arguments: Sequence[str]) -> int:
    """Run a subcommand, and return its exit code.

    Raises:
        UserError: an option is wrong, or the subcommand cannot do what the options ask for.
    """
    options = parser_of(name).parse_intermixed_args(arguments)
    out, values = getattr(options, "out", None), re.split("[=,]", ",".join(arguments))
    if out is not None and out.is_file() and [Path(value).absolute() for value in values].count(out.absolute()) > 1:
        raise UserError("--out", out, "is a file to read, too", "Name another one, so that nothing is lost.")
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    run: Callable[[Namespace], int | None] = getattr(import_module(f"distill_runner.commands.{module}"), function)
    return run(options) or 0


def summaries() -> str:
    """Return a line for each subcommand, for ``distill-run --help``."""
    lines = {name: (parser_of(name).description or "").rstrip(".") for name in SUBCOMMANDS}
    return "\n".join(f"  distill-run {name:10} {line[:1].lower()}{line[1:]}" for name, line in lines.items())
