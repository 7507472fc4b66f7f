"""Options of a sweep: the keys ``sweep.*``."""

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema


class SweepConfig(Schema):
    """Which points of a grid are trained, and how.

    Args:
        where: conditions on the keys of a point, such as ``loss.eta + loss.lambda <= 1``. A point that fails one of
            them is dropped.
        retry_failed: train points again that failed in an earlier run of the sweep.
        wait: false queues the points with Slurm and returns at once; the same command later reports their status.
        halving: n, for successive halving: of the settings in each cell of the table, the best 1/n continue after
            1/n^2 and again after 1/n of the epochs, by the mean over their seeds. None trains all points to the end.
    """

    where: list[str] = Field(default_factory=list)
    retry_failed: bool = False
    wait: bool = True
    halving: int | None = Field(None, ge=2)

    def model_post_init(self, _context: object) -> None:
        if self.halving and not self.wait:
            problem = "compares scores during the sweep, but sweep.wait=false does not wait for them"
            raise UserError("sweep.halving", self.halving, problem, "Leave out one of the two.")
