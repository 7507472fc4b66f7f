"""``distill-run track``: send finished runs to a tracker, from the files in their folders."""

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common.errors import UserError
from distill_runner.report.collect import Result, label, pictures_of, read_result, without_specs
from distill_runner.tracking.trackers import Outcome, Tracker, TrackerConfig, flatten, open_tracker

PLACE = ("project", "entity", "group")
BY_CLASS = "by_class"
"""Table of a run with the scores of each label, such as each type of entity: a row for each split and label."""


def track(options: Namespace) -> None:
    """Send the runs that the options name.

    Raises:
        UserError: the tracker cannot be opened or does not take all of a run; or, in the end, for folders without a
            finished run.
    """
    if options.tracker == "none":
        raise UserError("--tracker", "none", "sends nothing", "Take wandb, tensorboard or a plugin.")
    unfinished = list[str]()
    for folder in options.runs:
        result = read_result(folder)
        if result is None or result.get("status") != "done":
            unfinished.append(str(folder))
            continue
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        recorded = settings.get("tracker") or {}
        fields = recorded if recorded.get("name") == options.tracker else {"name": options.tracker}
        changes = {key: getattr(options, key) for key in PLACE if getattr(options, key)}
        config = TrackerConfig(**fields | changes).with_tags(result["task"], result["method"], result["teacher"])
        if not send(config, folder, result, settings):
            problem = f"did not take all of {folder}: see the warnings"
            raise UserError("--tracker", config.name, problem, "The same command sends the run again.")
        print(", ".join([f"{folder} was sent to {config.name}", *map(" ".join, place(config).items())]))
    if unfinished:
        raise UserError("run", " ".join(unfinished), "has no finished run; all others were sent")


def place(config: TrackerConfig) -> dict[str, str]:
    """Return where a tracker puts runs, by option; empty for TensorBoard, which puts them into their folders."""
    return {key: value for key in PLACE if (value := getattr(config, key)) and config.name != "tensorboard"}


def track_command(config: TrackerConfig, folder: Path) -> str:
    """Return the command that sends the finished run in ``folder`` to a tracker."""
    values = {"tracker": config.name, **place(config)}
    options = [word for name, value in values.items() for word in (f"--{name}", value)]
    return shlex.join(["distill-run", "track", str(folder), *options])


def send(config: TrackerConfig, folder: Path, result: Result, settings: Mapping[str, Any]) -> bool:
    """Send a finished run, and return whether the tracker took all of it.

    Args:
        config: with the tags of the run.
        settings: the resolved configuration of the run.
    """
    with open_tracker(config, folder, result["key"], run_settings(settings, result), "distill", False) as tracker:
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            step, epoch = values.pop("step"), values.pop("epoch", None)
            tracker.log({key: value for key, value in values.items() if value is not None}, step=step, epoch=epoch)
        send_result(tracker, folder, result)
    return not tracker.failed


def send_result(tracker: Tracker, folder: Path, result: Result) -> None:
    """Send what is known when a run has finished: summary, tables, pictures and model.

    The table ``by_class`` has a row for each split and label, of tasks whose labels have scores of their own.
    """
    entries = flatten(without_specs(result))
    splits = (result.get(BY_CLASS) or {}).items()
    rows = [{"split": split, "label": name, **scores} for split, own in splits for name, scores in own.items()]
    tables = {"results": [entries]} | ({BY_CLASS: rows} if rows else {})
    pictures = {file.stem: file for file in pictures_of(folder)}
    tracker.record(Outcome(entries, tables, pictures=pictures, model=folder / "model"))


def run_settings(settings: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tracker shows as the configuration of a run: the settings that it reads, and its table cell.

    A run that reads no corpus, or no transfer set, has none in its configuration file's groups either.
    """
    stages = [stage for stage in settings.get("stages", {}).values() if isinstance(stage, Mapping)]
    unread = {name for name in ("corpus", "transfer") if not any(stage.get(name) for stage in stages)}
    unread |= {"pretraining"} if "corpus" in unread else set()
    own = {key: value for key, value in settings.items() if key not in unread}
    choices = [f"{group} {choice}" for group, choice in (names.get("choices") or {}).items() if group not in names]
    return {**own, "cell": ", ".join([f"{names['task']} {label(names)}", *choices])}
