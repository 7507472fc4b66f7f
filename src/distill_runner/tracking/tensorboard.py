"""The TensorBoard tracker."""

import json
from collections.abc import Sequence
from pathlib import Path

from distill_runner.common.terminal import markdown_table
from distill_runner.tracking.tracker import Tracker, TrackerConfig, Values, columns, missing_package, point

NAMES = ("task", "method", "teacher", "seed")


class TensorBoardTracker(Tracker):
    """Tracker that writes event files to ``<folder>/tensorboard``.

    The configuration, the summary and the tables are written as texts. The page HPARAMS has one row for each run: the
    settings that distinguish runs, and the run's metrics. TensorBoard keeps no models.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", error) from error
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        code = json.dumps({"id": run_id, "job_type": job_type} | dict(settings), indent=1, default=str)
        self.writer.add_text("config", f"```json\n{code}\n```")

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        for key, value in point(values, step, epoch).items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step)

    def summary(self, values: Values) -> None:
        self.table("summary", [{"name": key, "value": value} for key, value in values.items()])
        settings = {key: value for key, value in values.items() if key in NAMES or key.startswith("settings/")}
        hparams = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
        names = {key: key.removeprefix("test/") for key in values}
        scores = {key: values[key] for key, name in names.items() if name == "score" or name.startswith("metrics/")}
        self.writer.add_hparams(hparams, scores, run_name=".")  # in the folder of the curves, not in a separate one

    def table(self, name: str, rows: Sequence[Values]) -> None:
        names = columns(rows)
        cells = [[str(row.get(column, "")) for column in names] for row in rows]
        self.writer.add_text(name, markdown_table(names, cells, text_columns=len(names)))

    def text(self, name: str, text: str) -> None:
        self.writer.add_text(name, f"```\n{text}\n```")

    def picture(self, name: str, file: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(file) as image:
            self.writer.add_image(name, np.asarray(image.convert("RGB")), dataformats="HWC")

    def finish(self, exit_code: int) -> None:
        self.writer.close()
