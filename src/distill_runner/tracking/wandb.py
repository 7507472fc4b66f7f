"""The Weights & Biases tracker."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import urlopen

from distill_runner.common.errors import UserError, first_line
from distill_runner.common.library_switches import quiet_wandb_telemetry
from distill_runner.tracking.tracker import Tracker, TrackerConfig, Values, columns, headline, missing_package, point

log = logging.getLogger(__name__)

WANDB_ANSWER_SECONDS = 4.0
"""Time limit for a complete response of W&B's server before the run starts; without one the run is offline."""
WANDB_INIT_SECONDS = 6.0
"""Time limit to start the run on a server that has responded. W&B's own limit is 90 s, and then the job dies."""
WANDB_FINISH_SECONDS = 8.0
"""Time limit for the last upload. W&B waits forever if the network is lost; data not uploaded stays on disk."""
KEY_LENGTH = 40
MINUTES_TO_RETRY = 10.0
"""Time for which runs on this machine do not contact a server that has not responded.

Otherwise every point of a sweep would wait for the server.
"""


class WandbTracker(Tracker):
    """Tracker that writes one W&B run and resumes it by its id; it goes offline by itself without a key or network.

    An agent of ``wandb sweep`` chooses the id itself. The run's own is then only in the configuration, as ``key``.
    """

    def __init__(self, config: TrackerConfig, folder: Path, run_id: str, settings: Values, job_type: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", error) from error
        quiet_wandb_telemetry()

        limits = wandb.Settings(
            console="wrap" if config.console else "off",
            init_timeout=WANDB_INIT_SECONDS,
            finish_timeout=WANDB_FINISH_SECONDS,
            x_disable_meta=True,  # user, host, folders and arguments of this process
            disable_git=True,
            disable_code=True,
            host="-",
        )

        id_of_agent = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None

        def start(mode: Literal["online", "offline"] | None) -> Any:
            wandb.setup(wandb.Settings(silent=True))  # silent also stops W&B from asking for a key on a terminal
            return wandb.init(
                id=id_of_agent or run_id,
                resume=None if id_of_agent else "allow",
                dir=str(folder),
                config={**settings, "key": run_id} if id_of_agent else dict(settings),
                name=config.title or folder.name,
                job_type=job_type,
                mode=mode,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                settings=limits,
            )

        try:
            self.run = start("offline" if self._server_is_down(wandb, config) else config.mode)
        except Exception as error:
            log.warning("W&B did not start, tracking offline: %s", first_line(error))
            try:
                wandb.teardown()  # W&B's service still holds the run id of the failed start
                self.run = start("offline")
            except Exception as offline_error:
                raise UserError("tracker", config.name, first_line(offline_error)) from offline_error
        # A separate step is the x axis: W&B drops points whose built-in step goes back, as in a resumed run.
        self.run.define_metric("*", step_metric="step")
        self.wandb, self.sends_model = wandb, config.model
        log.info("W&B: %s", self.run.url or f"wandb sync {Path(self.run.dir).parent}")

    @staticmethod
    def _server_is_down(wandb: Any, config: TrackerConfig) -> bool:
        """Return whether the run would contact W&B's server although the server does not respond."""
        key, key_file = os.environ.get("WANDB_API_KEY", ""), Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        has_key = len(key) >= KEY_LENGTH or key_file.exists()
        if "offline" in (config.mode, os.environ.get("WANDB_MODE")) or not has_key:
            return False  # W&B does not wait for the server in these cases
        server = str(wandb.setup(wandb.Settings(silent=True)).settings.base_url)
        marker = Path(gettempdir(), f"distill-run-wandb-{os.getuid()}-{sha256(server.encode()).hexdigest()[:8]}")
        if marker.exists() and time.time() - marker.stat().st_mtime < 60 * MINUTES_TO_RETRY:
            log.warning("W&B's server did not answer a moment ago, tracking offline (%s)", server)
            return True
        if server_responds(server):
            return False
        log.warning("W&B's server has not answered in %.0f s, tracking offline (%s)", WANDB_ANSWER_SECONDS, server)
        marker.touch()
        return True

    def log(self, values: Values, *, step: int, epoch: float | None = None) -> None:
        self.run.log(point(values, step, epoch))

    def summary(self, values: Values) -> None:
        self.run.summary.update(headline(values))

    def table(self, name: str, rows: Sequence[Values]) -> None:
        names = columns(rows)
        data = [[row.get(column) for column in names] for row in rows]
        self.run.log({name: self.wandb.Table(columns=names, data=data, allow_mixed_types=True)})

    def text(self, name: str, text: str) -> None:
        self.run.log({name: self.wandb.Html(f"<pre>{escape(text)}</pre>")})

    def picture(self, name: str, file: Path) -> None:
        self.run.log({name: self.wandb.Image(str(file), caption=file.stem)})

    def model(self, folder: Path) -> None:
        if self.sends_model:
            artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model")
            artifact.add_dir(str(folder))
            self.run.log_artifact(artifact, aliases=["latest", "student"])

    def finish(self, exit_code: int) -> None:
        thread = threading.Thread(target=self.run.finish, kwargs={"exit_code": exit_code}, daemon=True)
        thread.start()
        thread.join(WANDB_FINISH_SECONDS + 2)
        if thread.is_alive():
            log.warning("W&B does not finish: wandb sync %s uploads the rest", Path(self.run.dir).parent)


def server_responds(server: str) -> bool:
    """Return whether ``server`` sends a complete response within ``WANDB_ANSWER_SECONDS``, even an HTTP error."""
    outcomes = list[bool]()

    def ask() -> None:
        try:
            with urlopen(server, timeout=WANDB_ANSWER_SECONDS) as answer:
                answer.read(1 << 16)
        except HTTPError:
            outcomes.append(True)  # an error response also shows that the server responds
        except (OSError, ValueError):
            outcomes.append(False)
        else:
            outcomes.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WANDB_ANSWER_SECONDS)
    return outcomes == [True]
