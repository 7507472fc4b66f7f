"""``sweep.*``: what a grid leaves out and tries again."""

from pydantic import Field

from distill_runner.common.schema import Schema


class SweepConfig(Schema):
    """How a grid is brought to its end.

    Args:
        where: conditions that a point must meet (``conditions``).
        retry_failed: points that failed before are tried again.
        halving: the part of the points, 1 / halving, that is kept at each rung (``halving``); None keeps all.
    """

    where: list[str] = Field(default_factory=list)
    retry_failed: bool = False
    halving: int | None = Field(None, ge=2)
