"""``distill-run dashboard``: create a view in a W&B project, with panels for distillation.

The panels use only names that every run logs. Nothing is read from the project, so the view can be created before the
first run.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from distill_runner.commands.track import BY_CLASS
from distill_runner.common.errors import UserError, root_cause
from distill_runner.tasks import TASK_TYPES

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import PanelTypes
    from wandb_workspaces.workspaces import Section, Workspace

RATE, TEMPERATURE = "settings/optim/lr", "settings/kd/temperature"
COLUMNS = (
    "task",
    "method",
    "mapping",
    "attention",
    "score",
    "teacher_score",
    "published/value",
    *(RATE, TEMPERATURE),
    "seed",
    "best_epoch",
    "seconds",
)
"""Columns of the table of runs: names of values in a result, as ``tracking.flatten`` joins them."""
CELL = "cell"
"""Name of a table cell: task, method, mapping and attention. Runs of a cell differ in seed or settings."""


def make_dashboard(options: Namespace) -> None:
    """Create or print the dashboard.

    Raises:
        UserError: a package or an account is missing, or the server refuses.
    """
    from distill_runner.compose.folders import all_folders

    view = dashboard(options.project, options.entity or "", options.sweep, terms(*all_folders()))
    print(as_json(view) if options.print else save(view))


def terms(*folders: Path) -> list[str]:
    """Return the loss terms of all methods. They name curves ``loss/<term>`` and values ``settings/<term>/weight``."""
    files = [file for folder in folders for file in sorted((folder / "method").glob("*.yaml"))]
    methods = [yaml.safe_load(file.read_text(encoding="utf-8")).get("method", {}) for file in files]
    return list(dict.fromkeys(term for method in methods for term in method.get("terms", {})))


def metric_names() -> list[str]:
    """Return the metrics of all task types. They name curves ``validation/<metric>``; a project has some of them."""
    return list(dict.fromkeys(name for task in TASK_TYPES.values() for name in task.metric_functions))


def dashboard(project: str, entity: str, sweep: str | None, terms: Sequence[str]) -> "Workspace":
    """Return the view without saving it.

    Args:
        entity: user or team; empty for the account that is logged in when the view is saved.
        sweep: name of the group of runs to show; None for all runs.
        terms: names of loss terms.
    Raises:
        UserError: the package wandb-workspaces is missing.
    """
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError as error:
        problem = f"the package cannot be imported ({error})"
        raise UserError("wandb-workspaces", None, problem, "pip install 'distill-run[wandb]'") from error
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Distillation: {sweep}" if sweep else "Distillation",
        sections=_sections(terms),
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("Group") == sweep) if sweep else "",
            order=[ws.Ordering(ws.Summary("score"), ascending=False)],
            pinned_columns=[f"summary:{name}" for name in (*COLUMNS, *_weights(terms))],
        ),
        auto_generate_panels=True,  # shows other values, which a user's own method logs
    )


def as_json(view: "Workspace") -> str:
    """Return the view's specification as JSON, as W&B's server would get it."""
    spec: str = view._model.spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return spec


def save(view: "Workspace") -> str:
    """Add the view to its project, and return its address.

    Raises:
        UserError: there is no account or no network, or the server refuses.
    """
    import wandb

    try:
        view.entity = view.entity or wandb.Api().default_entity or ""
        return str(view.save().url)
    except Exception as error:  # raised by W&B, by its HTTP client, or because of the server's answer
        remedy = "Log in with: wandb login. --print needs no account."
        raise UserError("distill-run dashboard", None, root_cause(error), remedy) from error


def _sections(terms: Sequence[str]) -> "list[Section]":
    from wandb_workspaces.reports.v2 import interface as wr
    from wandb_workspaces.workspaces import Section

    def bars(title: str, function: Literal["mean", "max"]) -> "PanelTypes":
        cells = wr.Config(CELL)
        return wr.BarPlot(title=title, metrics=["score"], groupby=cells, groupby_aggfunc=function, max_bars_to_show=100)

    score, names = wr.SummaryMetric("score"), [RATE, TEMPERATURE, *_weights(terms)]
    axes = [wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(name), log=name == RATE or None) for name in names]
    panels: dict[str, list[PanelTypes]] = {
        "Results": [
            bars("Score, mean of all runs of a task and method", "mean"),
            bars("Score, best of all runs of a task and method", "max"),
            wr.MediaBrowser(title="Sweeps", media_keys=["table", "pictures/scores"]),
            wr.WeavePanelSummaryTable(table_name="results"),
        ],
        "Scores by epoch": [_curve(f"validation/{metric}", x="epoch") for metric in metric_names()],
        "Scores by label": [
            wr.WeavePanelSummaryTable(table_name=BY_CLASS),
            wr.MediaBrowser(title="Errors by label", media_keys=["errors"]),
        ],
        "Losses": [_curve(f"loss/{term}") for term in terms] + [_curve("loss")],
        "Hyper-parameters": [
            *(wr.ScatterPlot(x=wr.SummaryMetric(name), y=score, log_x=name == RATE or None) for name in names),
            wr.ParallelCoordinatesPlot(columns=[*axes, wr.ParallelCoordinatesPlotColumn(score)]),
            wr.ParameterImportancePlot(with_respect_to="score"),
        ],
        "Training": [_curve("lr"), _curve("examples_per_second")],
    }
    return [Section(name=name, panels=content, is_open=True) for name, content in panels.items()]


def _curve(metric: str, x: str = "step") -> "PanelTypes":
    """Return a plot with a line for each task and method: the mean of its runs, and their range."""
    from wandb_workspaces.reports.v2 import interface as wr

    return wr.LinePlot(
        title=metric, x=x, y=[metric], groupby=wr.Config(CELL), groupby_aggfunc="mean", groupby_rangefunc="minmax"
    )


def _weights(terms: Sequence[str]) -> list[str]:
    """Return the names of the loss weights. For ALP-KD: beta (ce), eta (kd) and lambda (intermediate)."""
    return [f"settings/{term}/weight" for term in terms]
