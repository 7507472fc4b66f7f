"""``hydra/sweeper=grid``: Hydra's basic sweeper, that ends with the table of its points whatever happened to them."""

import sys
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


@dataclass
class GridSweeperConf:
    """As Hydra's basic sweeper: ``params`` are overrides of the sweep, which those of the command line replace."""

    _target_: str = "hydra_plugins.distill_runner_grid.grid.GridSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridSweeperConf, provider="distill-run")


class GridSweeper(BasicSweeper):
    """Every combination of the parameters; a point that fails leaves the others alone, and the exit code is then 1."""

    def sweep(self, arguments: list[str]) -> Any:
        from distill_runner.report.table import methods_table

        jobs = [job for batch in super().sweep(arguments) for job in batch]
        results = [job.return_value for job in jobs]
        if any(result["status"] != "planned" for result in results):
            print(methods_table(results))
        if any(result["status"] == "failed" for result in results):
            sys.exit(1)
        return results
