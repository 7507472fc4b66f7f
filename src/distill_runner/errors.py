"""What a user can do wrong, said in one or two lines."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class UserError(Exception):
    """A mistake in the configuration, the data or the environment, never a fault of the program.

    The command line prints it without a traceback and ends with exit code 2.

    Args:
        key: the configuration key (or file) at fault, as typed on the command line.
        value: its value; ``None`` leaves it out of the message.
        problem: what is wrong with it.
        remedy: what to type or do instead.
    """

    def __init__(self, key: str, value: Any, problem: str, remedy: str = "") -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        super().__init__(key, value, problem, remedy)  # all four, so that it survives pickling between processes

    def __str__(self) -> str:
        subject = self.key if self.value is None else f"{self.key}={self.value}"
        return f"{subject}: {self.problem}" + (f"\n  {self.remedy}" if self.remedy else "")


class Schema(BaseModel):
    """Base of every typed part of a configuration: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
