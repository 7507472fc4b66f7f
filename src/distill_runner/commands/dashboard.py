"""``distill-run dashboard``: create a view in a W&B project, with panels for distillation.

The panels use only names that every run logs. Nothing is read from the project, so the view can be created before the
first run.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import yaml

from distill_runner.commands.track import BY_CLASS
from distill_runner.common.errors import UserError, root_cause
from distill_runner.tasks import TASK_TYPES
from distill_runner.tracking.trackers import imported

_RATE, TEMPERATURE = "settings/optim/lr", "settings/kd/temperature"
_NAMES = ("task", "method", "mapping", "attention", "score", "teacher_score", "published/value", _RATE, TEMPERATURE)
_COLUMNS = (*_NAMES, "seed", "best_epoch", "seconds")
"""Columns of the table of runs: names of values in a result, as ``tracking.flatten`` joins them."""
CELL = "cell"
"""Name of a table cell: task, method, mapping and attention. Runs of a cell differ in seed or settings."""


def make_dashboard(options: Namespace) -> None:
    """Create or print the dashboard.

    The loss terms of all methods name curves ``loss/<term>`` and values ``settings/<term>/weight``.

    Raises:
        UserError: a package or an account is missing, or the server refuses.
    """
    from distill_runner.compose.folders import all_folders

    files = [file for folder in all_folders() for file in sorted((folder / "method").glob("*.yaml"))]
    methods = [yaml.safe_load(file.read_text(encoding="utf-8")).get("method", {}) for file in files]
    terms = list(dict.fromkeys(term for method in methods for term in method.get("terms", {})))
    view = dashboard(options.project, options.entity or "", options.sweep, terms)
    print(as_json(view) if options.print else save(view))


def metric_names() -> list[str]:
    """Return the metrics of all task types. They name curves ``validation/<metric>``; a project has some of them."""
    return list(dict.fromkeys(name for task in TASK_TYPES.values() for name in task.metric_names))


def dashboard(project: str, entity: str, sweep: str | None, terms: Sequence[str]) -> Any:
    """Return the view without saving it.

    Args:
        entity: user or team; empty for the account that is logged in when the view is saved.
        sweep: name of the group of runs to show; None for all runs.
        terms: names of loss terms.
    Raises:
        UserError: the package wandb-workspaces is missing.
    """
    ws: Any = imported("wandb_workspaces.workspaces", "wandb")
    wr: Any = imported("wandb_workspaces.reports.v2.interface", "wandb")

    def bars(title: str, function: str) -> Any:
        cells = wr.Config(CELL)
        return wr.BarPlot(title=title, metrics=["score"], groupby=cells, groupby_aggfunc=function, max_bars_to_show=100)

    def curve(metric: str, x: str = "step") -> Any:
        """Return a plot with a line for each task and method: the mean of its runs, and their range."""
        cells = {"groupby": wr.Config(CELL), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return wr.LinePlot(title=metric, x=x, y=[metric], **cells)

    # For ALP-KD, the weights are beta (ce), eta (kd) and lambda (intermediate).
    weights = [f"settings/{term}/weight" for term in terms]
    score, names = wr.SummaryMetric("score"), [_RATE, TEMPERATURE, *weights]
    axes = [wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(name), log=name == _RATE or None) for name in names]
    panels: dict[str, list[Any]] = {
        "Results": [
            bars("Score, mean of all runs of a task and method", "mean"),
            bars("Score, best of all runs of a task and method", "max"),
            wr.MediaBrowser(title="Sweeps", media_keys=["table", "pictures/scores"]),
            wr.WeavePanelSummaryTable(table_name="results"),
        ],
        "Scores by epoch": [curve(f"validation/{metric}", x="epoch") for metric in metric_names()],
        "Scores by label": [wr.WeavePanelSummaryTable(table_name=BY_CLASS)],
        "Losses": [curve(f"loss/{term}") for term in terms] + [curve("loss")],
        "Hyper-parameters": [
            *(wr.ScatterPlot(x=wr.SummaryMetric(name), y=score, log_x=name == _RATE or None) for name in names),
            wr.ParallelCoordinatesPlot(columns=[*axes, wr.ParallelCoordinatesPlotColumn(score)]),
            wr.ParameterImportancePlot(with_respect_to="score"),
        ],
        "Training": [curve("lr"), curve("examples_per_second")],
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Distillation: {sweep}" if sweep else "Distillation",
        sections=[ws.Section(name=name, panels=content, is_open=True) for name, content in panels.items()],
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("Group") == sweep) if sweep else "",
            order=[ws.Ordering(ws.Summary("score"), ascending=False)],
            pinned_columns=[f"summary:{name}" for name in (*_COLUMNS, *weights)],
        ),
        auto_generate_panels=True,  # shows other values, which a user's own method logs
    )


def as_json(view: Any) -> str:
    """Return the view's specification as JSON, as W&B's server would get it."""
    spec: str = view._model.spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)  # private: save() sends it
    return spec


def save(view: Any) -> str:
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
