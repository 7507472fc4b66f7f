"""The MLflow tracker."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_runner.common.library_switches import disable_mlflow_telemetry
from distill_runner.tracking.tracker import Tracker, TrackerConfig, Values, columns, flatten, headline, missing_package

KEY = "distill_run.key"
"""Tag by which a run is found again."""
MAX_PARAMS, MAX_TEXT = 100, 500
"""Parameters that MLflow takes at once, and characters of one that every version stores."""


class MlflowTracker(Tracker):
    """Tracker that writes one run of an MLflow experiment, named like the project, and resumes it by its key.

    ``MLFLOW_TRACKING_URI`` says where, as in MLflow itself. The configuration becomes parameters, curves and the
    summary become metrics, tables, texts and pictures become artifacts.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        disable_mlflow_telemetry()
        try:
            import mlflow
        except ImportError as error:
            raise missing_package("mlflow", error) from error
        self.client, self.folder, self.sends_model = mlflow.MlflowClient(), folder, config.model
        experiment = self.client.get_experiment_by_name(config.project)
        number = experiment.experiment_id if experiment else self.client.create_experiment(config.project)
        runs = self.client.search_runs([number], f"tags.`{KEY}` = '{run_id}'", max_results=1)
        if runs:
            self.run = runs[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        tags: dict[str, Any] = {KEY: run_id, "job_type": job_type, "tags": "; ".join(config.tags)}
        tags |= {"group": config.group} if config.group else {}
        self.run = self.client.create_run(number, tags=tags, run_name=config.title or folder.name).info.run_id
        params = [mlflow.entities.Param(_name(key), str(value)[:MAX_TEXT]) for key, value in flatten(settings).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(self.run, params=params[start : start + MAX_PARAMS])

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        numbers = {"epoch": epoch, **values}
        for key, value in numbers.items():
            if isinstance(value, int | float):
                self.client.log_metric(self.run, _name(key), value, step=step)

    def summary(self, values: Values) -> None:
        for key, value in headline(values).items():
            if isinstance(value, int | float):
                self.client.log_metric(self.run, _name(key), value)
            else:
                self.client.set_tag(self.run, _name(key), value)

    def table(self, name: str, rows: Sequence[Values]) -> None:
        cells = {str(key): [str(row.get(key, "")) for row in rows] for key in columns(rows)}
        self.client.log_table(self.run, cells, f"{name}.json")

    def text(self, name: str, text: str) -> None:
        self.client.log_text(self.run, text, f"{name}.txt")

    def picture(self, name: str, file: Path) -> None:
        self.client.log_artifact(self.run, str(file), str(Path(name).parent) if "/" in name else None)

    def model(self, folder: Path) -> None:
        if self.sends_model:
            self.client.log_artifacts(self.run, str(folder), "model")

    def finish(self, exit_code: int) -> None:
        self.client.set_terminated(self.run, "FAILED" if exit_code else "FINISHED")


def _name(key: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w./ -]", "_", key)
