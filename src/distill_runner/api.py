"""Use distill-run from Python: compose a run, run it, and read results as a data frame, a table or a figure.

Overrides are written as on the command line, or as a mapping: ``compose("task=rte method=alp", {"seed": 1})``.
"""

import json
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import TYPE_CHECKING, Any

from distill_runner.common.errors import UserError, format_typed, require_choice
from distill_runner.report.collect import Result, read_result, read_results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from omegaconf import DictConfig

    from distill_runner.compose.run_config import RunConfig

Overrides = str | Mapping[str, Any] | Sequence[str]
"""Overrides in a text, ``"task=rte method=alp"``, as a mapping, ``{"optim": {"lr": 2e-5}}``, or in a list of texts."""
TABLES = "tables: "
"""Beginning of the line in which a sweep names its folder, at its end."""

__all__ = ["compare", "compose", "figure", "frame", "results", "run", "sweep", "table"]


def override_list(overrides: Sequence[Overrides]) -> list[str]:
    """Return overrides as the command line takes them, one string each.

    >>> override_list(["task=rte method=alp", {"seed": 1, "task.test": None, "task.columns": ["a", "b"]}])
    ['task=rte', 'method=alp', 'seed=1', 'task.test=null', 'task.columns=[a,b]']
    """
    typed = list[str]()
    for part in overrides:
        if isinstance(part, str):
            typed += filter(None, re.split(r"\s+(?=[+~]{0,2}[\w./@]+=|~[\w./]+(?:\s|$))", part.strip()))
        elif isinstance(part, Mapping):
            for key, value in part.items():
                if isinstance(value, Mapping) and value:
                    typed += override_list([{f"{key}.{inner}": leaf for inner, leaf in value.items()}])
                else:  # a text is typed as it is, such as "1,2" for two points
                    typed.append(f"{key}={value if isinstance(value, str) else format_typed(value)}")
        else:
            typed += override_list(part)
    return typed


def compose(*overrides: Overrides) -> "RunConfig":
    """Return the typed configuration of a run.

    Args:
        overrides: overrides as on the command line: texts of one or several, or mappings of keys to values.
    Raises:
        UserError: the command line would refuse an override, with the same message; or the overrides are a sweep.
    """
    from omegaconf.errors import OmegaConfBaseException

    from distill_runner.compose.explain import user_facing_error
    from distill_runner.compose.run_config import typed_run

    typed = override_list(overrides)
    config = _single(typed)
    try:
        return typed_run(config, typed)
    except (UserError, OmegaConfBaseException) as error:
        raise user_facing_error(error, config, typed) from error


def _single(overrides: Sequence[str]) -> "DictConfig":
    """Return the configuration of a single run, as Hydra composes it.

    Raises:
        UserError: as for ``compose``.
    """
    from hydra.types import RunMode

    groups = [override for override in overrides if override.startswith(("experiment=", "sweep="))]
    if groups and "hydra.mode=RUN" not in overrides:
        hydra = composed(*overrides, hydra=True).hydra
        typed = {override.partition("=")[0] for override in overrides}
        axes = [f"{key}={values}" for key, values in (hydra.sweeper.params or {}).items() if key not in typed]
        if hydra.mode == RunMode.MULTIRUN and axes:
            problem = f"is a sweep, but one run is composed here: {' '.join(axes)}"
            raise UserError(groups[-1], None, problem, "Give each key one value, or call api.sweep.")
    return composed(*overrides)


def run(*overrides: Overrides, outputs: Path | str = "outputs", progress: bool = True) -> Result:
    """Train what the overrides ask for, as ``distill-run`` does. Stages that are in the store are not trained again.

    >>> result = run("experiment=demo_methods", "method=rkd", "plan=true")  # doctest: +SKIP
    >>> [(stage["name"], stage["hit"]) for stage in result["stages"]]  # doctest: +SKIP
    [('pretrain', False), ('teacher', False), ('targets', False), ('student', False)]

    Args:
        overrides: as for ``compose``.
        outputs: folder that receives ``runs/<name>`` and, unless ``store.dir`` or ``DISTILL_STORE_DIR`` is set, the
            ``store``.
        progress: print what the command line prints, unless the program has set up ``logging`` itself.
    Returns:
        The content of ``result.json``; with ``plan``, which trains nothing, the names of the run and its ``stages``
        with the status ``planned``.
    Raises:
        UserError: the configuration, data or environment is invalid. It is raised before training where possible.
        TrainingError: training cannot continue.
        TrainingPaused: after ``runtime.pause_after`` epochs.
    """
    from omegaconf.errors import OmegaConfBaseException

    from distill_runner.compose.explain import user_facing_error
    from distill_runner.compose.resolvers import run_key
    from distill_runner.running import run_composed

    outputs, typed = Path(outputs).absolute(), override_list(overrides)
    config = _single(typed)
    try:
        if config.store.dir == "outputs/store" and not os.environ.get("DISTILL_STORE_DIR"):
            typed.append(f"store.dir={outputs / 'store'}")
            config = _single(typed)
        folder = outputs / "runs" / run_key(_root_=config)
    except OmegaConfBaseException as error:
        raise user_facing_error(error, config, typed) from error
    with _printed_log(progress):
        outcome = run_composed(config, typed, folder)
    result = outcome if outcome["status"] == "planned" else read_result(folder)
    assert result is not None, "a run that ends without an error writes its result"
    return result


@contextmanager
def _printed_log(progress: bool) -> Iterator[None]:
    """Print the log of this package within the context, if nobody else would show it; without ``progress`` nothing."""
    package = logging.getLogger("distill_runner")
    handler, level = logging.StreamHandler() if progress else logging.NullHandler(), package.level
    if not package.hasHandlers():
        package.addHandler(handler)
        package.setLevel(logging.INFO)
    try:
        with nullcontext() if progress else redirect_stdout(StringIO()):
            yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


def sweep(*overrides: Overrides, outputs: Path | str = "outputs", progress: bool = True) -> "pd.DataFrame":
    """Train a grid, as ``distill-run -m`` does in a process of its own, and return the frame of its runs.

    >>> sweep("experiment=demo_methods method=nkd,rkd", {"seed": "1,2"})[["method", "seed", "score"]]  # doctest: +SKIP

    Args:
        overrides: as for ``compose``; several values of a key are separated by commas.
        outputs, progress: as for ``run``; ``progress`` prints line by line.
    Raises:
        UserError: the command refuses the grid.
    """
    outputs = Path(outputs).absolute()
    command = [sys.executable, "-m", "distill_runner", "-m", f"hydra.sweep.dir={outputs / 'runs'}"]
    environment = {**os.environ, "DISTILL_STORE_DIR": os.environ.get("DISTILL_STORE_DIR") or str(outputs / "store")}
    lines, folder = deque[str](maxlen=2), ""
    command += override_list(overrides)
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True, encoding="utf-8", env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            folder = lines[-1].removeprefix(TABLES) if line.startswith(TABLES) else folder
            if progress:
                print(line, end="")
    if not folder and process.returncode:
        raise UserError("sweep", None, "\n  ".join(lines))
    points = json.loads(Path(folder, "sweep.json").read_text(encoding="utf-8"))["points"] if folder else []
    return frame(result for point in points if (result := read_result(Path(point["folder"]))) is not None)


def _result_list(results: Iterable[Result]) -> list[Result]:
    """Return results in a list.

    Raises:
        UserError: one of them is no result, such as the name of a folder, an override, or a column of a frame.
    """
    results = [results] if isinstance(results, Mapping) else [*results]
    if others := [result for result in results if not isinstance(result, Mapping)]:
        raise UserError("results", others[0], "is no result of a run", "Give what api.run or api.results returned.")
    return results


def results(*folders: Path | str) -> list[Result]:
    """Return the results of all runs in ``folders``, by default in ``outputs/runs``.

    >>> [result["score"] for result in results("outputs/runs")]  # doctest: +SKIP
    [0.7432, 0.7511]

    Args:
        folders: folders of runs, or folders that contain such folders.
    Returns:
        One result for each run: the content of ``result.json``, or of ``status.json`` for an unfinished run.
    Raises:
        UserError: there is no such folder.
    """
    return read_results(map(Path, folders or ("outputs/runs",)))


def frame(results: Iterable[Result]) -> "pd.DataFrame":
    """Return a data frame with a row for each run: names, scores as fractions, cost, and a column for each setting.

    Runs that end with another stage than the student, such as the teachers that a sweep trains first, have no score,
    and no row.

    >>> frame(results())[["method", "seed", "score"]]  # doctest: +SKIP

    Args:
        results: results as ``results`` returns them. Columns of settings have the setting's key, such as ``optim.lr``.
    """
    from distill_runner.report.frame import frame

    return frame(_result_list(results))


def table(results: Sequence[Result], style: str = "markdown", split: Sequence[str] = ()) -> str:
    """Return the table that ``distill-run table`` prints, as text.

    Args:
        results: results as ``results`` returns them.
        style: ``markdown``, ``latex``, ``csv`` or ``terminal``.
        split: settings of a grid whose values are rows, such as ``optim.lr``.
    Raises:
        UserError: there is no such style, or no run has such a setting.
    """
    from distill_runner.report.formats import as_csv, latex, markdown, terminal
    from distill_runner.report.frame import tabulate

    styles = {"markdown": markdown, "latex": latex, "csv": as_csv, "terminal": terminal}
    require_choice("style", style, styles, "there is no such style")
    return styles[style](tabulate(_result_list(results), [split] if isinstance(split, str) else split))


def figure(results: Sequence[Result]) -> "Figure":
    """Return a figure of the scores by task and method, with the published numbers and the teachers' scores."""
    from distill_runner.report.figures import drawable, score_figure

    return score_figure(drawable(_result_list(results)))


def compare(
    predictions: Mapping[str, Path | str | Sequence[Path | str]],
    gold: Path | str,
    *,
    margin: float | None = None,
    metric: str | None = None,
    task_type: str | None = None,
    labels: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare predictions of any program in files, as ``distill-run compare --predictions`` does.

    >>> compare({"rkd": ["r1.csv", "r2.csv"], "base": "b.csv"}, "gold.csv", margin=1)["methods"]  # doctest: +SKIP

    Args:
        predictions: method -> its file, or files of several seeds. The first method is compared with each other one.
        gold: file of the labels of the same examples, or qrels.
        margin: difference in points below which methods are the same.
        metric, task_type, labels: as ``--metric``, ``--type`` and ``--labels``.
    Returns:
        What ``--format json`` writes: ``methods``, ``comparisons``, ``labels``, ``agreement``; scores are in points.
    Raises:
        UserError: a file cannot be read, its ids are not those of the gold file, or can be taken in two ways.
    """
    from distill_runner.report.file_comparison import compare_files

    if margin is not None and not margin > 0:
        raise UserError("margin", margin, "must be a positive number")
    files = {name: [*map(Path, [own] if isinstance(own, str | Path) else own)] for name, own in predictions.items()}
    return compare_files(files, Path(gold), margin, metric=metric, task_type=task_type, labels=labels).as_json()


def composed(*overrides: str, hydra: bool = False) -> "DictConfig":
    """Return the whole configuration as Hydra composes it, untyped.

    Args:
        hydra: whether it has Hydra's own node.
    Raises:
        UserError: as for ``compose``.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from distill_runner.compose import resolvers
    from distill_runner.compose.command_line import expand_shorthand, quoted
    from distill_runner.compose.explain import explain
    from distill_runner.compose.folders import config_folder

    resolvers.register()
    of_caller = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            typed = [quoted(expand_shorthand(override)) for override in overrides]
            return compose("config", typed, return_hydra_config=hydra)
    except Exception as error:
        raise explain(error, overrides) or error from error
    finally:
        GlobalHydra.instance().hydra = of_caller
