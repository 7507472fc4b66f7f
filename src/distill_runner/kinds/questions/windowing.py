"""How a context that is longer than a window is divided."""

from typing import Annotated, Literal

from pydantic import Field

from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema


class Windowing(Schema):
    """How a context is divided.

    Args:
        stride: ``overlap``: neighbouring windows share ``tokens`` tokens (fast tokenizers, run_qa of ``transformers``);
            ``step``: each begins ``tokens`` behind the one before (the old run_squad, the papers' time), and an answer
            may begin only where its token has most context.
        tokens: 128 in Pro-KD.
        max_question: tokens of a question, the rest is cut; 64 in run_squad. A question never takes more than half of a
            window.
    """

    stride: Annotated[
        Literal["overlap", "step"],
        Reading("as run_qa; the papers' time had run_squad's step", "Pro-KD"),
    ] = "overlap"
    tokens: int = Field(128, ge=1)
    max_question: int | None = Field(None, ge=1)

    def step(self, room: int) -> int:
        """Tokens between the beginnings of two windows with ``room`` tokens of context; at least a quarter of them."""
        step = self.tokens if self.stride == "step" else room - self.tokens
        return min(max(step, room // 4, 1), room)
