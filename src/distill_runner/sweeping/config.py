"""``sweep.*``: what a grid leaves out and tries again."""

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.schema import Schema


class SweepConfig(Schema):
    """How a grid is brought to its end.

    Args:
        where: conditions that a point must meet (``conditions``).
        retry_failed: points that failed before are tried again.
        wait: false queues the points with Slurm and comes back (``submitting``); the same command later tells of them.
        halving: the part of the points, 1 / halving, that is kept at each rung (``halving``); None keeps all.
    """

    where: list[str] = Field(default_factory=list)
    retry_failed: bool = False
    wait: bool = True
    halving: int | None = Field(None, ge=2)

    def model_post_init(self, _context: object) -> None:
        if self.halving and not self.wait:
            problem = "chooses by scores, and with sweep.wait=false nothing waits for them"
            raise UserError("sweep.halving", self.halving, problem, "Leave out one of the two.")
