"""Configuration of how a context that is longer than a window is divided."""

from typing import Annotated, Literal

from pydantic import Field

from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema


class Windowing(Schema):
    """How a context that is longer than a window is divided into windows.

    Args:
        stride: meaning of ``tokens``. With ``overlap``, neighbouring windows share ``tokens`` tokens (fast tokenizers,
            run_qa of ``transformers``). With ``step``, each window begins ``tokens`` tokens after the previous one (the
            old run_squad, from the time of the papers). A token can then start an answer only in the window where the
            token has most context.
        tokens: number of tokens shared by two windows or between their starts, see ``stride``; 128 in Pro-KD.
        max_question: maximum number of tokens of a question, longer questions are truncated; 64 in run_squad. A
            question never takes more than half of a window.
    """

    stride: Annotated[
        Literal["overlap", "step"],
        Reading("as in run_qa; in the papers' time, run_squad used a step", "Pro-KD"),
    ] = "overlap"
    tokens: int = Field(128, ge=1)
    max_question: int | None = Field(None, ge=1)

    def step(self, room: int) -> int:
        """Return the tokens between the starts of two windows, each with ``room`` tokens of context.

        The step is at least a quarter of ``room``.
        """
        step = self.tokens if self.stride == "step" else room - self.tokens
        return min(max(step, room // 4, 1), room)
