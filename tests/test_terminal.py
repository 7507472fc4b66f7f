"""What is shown while stages are trained: bars on a terminal, plain lines on pipes, time left over all stages."""

import io
import logging
import re
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from distill_runner.common import terminal
from distill_runner.common.terminal import Stages, duration

VALUES = {"lr": 1e-5, "loss": 1.5, "loss/ce": 0.5, "loss/kd": 1.0, "examples_per_second": 123.4}
SCORES = {"validation/accuracy": 0.91234}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, width: int, **values: Any) -> str:
    """All that a terminal of that width gets of two stages."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    rich = terminal._bars()
    rich.live.console = Console(file=screen, width=width, force_terminal=True)
    monkeypatch.setattr(terminal, "_bars", lambda: rich)
    with Stages({"teacher": 2.0, "student": 1.0}) as stages:
        bar = stages.bar("teacher")
        rich.refresh()
        bar.show({**VALUES, "share_done": 0.1}, 1, 0.1)
        bar.show({**VALUES, "share_done": 0.5, **values}, 5, 0.5)
        rich.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_speed_and_time_are_on_it(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = shown(monkeypatch, width)
    lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
    assert max(map(len, lines)) <= width
    assert "first steps" in lines[0]
    assert "123 ex/s" in lines[-1]
    assert "left" in lines[-1]


def test_a_term_that_tells_its_divergence_shows_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kd divergence 0.0125" in shown(monkeypatch, 200, **{"kd/divergence": 0.0125})


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    clock = iter(range(0, 100, 5))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO), Stages({"teacher": 300.0, "student": 100.0}) as stages:
        bar = stages.bar("teacher")
        bar.show({**VALUES, "share_done": 0.2}, 2, 0.2)
        bar.show({**VALUES, "share_done": 0.4}, 4, 0.4)
        bar.show(SCORES, 10, 1.0)
    assert said.getvalue() == ""
    first, second, scores = caplog.messages
    assert first == "teacher   20 %  epoch 0.20  loss 1.5000  ce 0.5000  kd 1.0000  123 ex/s"
    assert re.fullmatch(r"teacher   40 %  .*  123 ex/s  (\d+) s left, (\d+) s left in total", second)
    left, whole = map(int, re.findall(r"(\d+) s", second))
    # The student's share of the work is a third of the teacher's, and the teacher has 0.6 of its own left.
    assert (whole - left) / left == pytest.approx(1 / 3 / 0.6, rel=0.05)
    assert scores == "teacher  epoch 1  accuracy 91.23"


def test_an_evaluation_does_not_count_as_the_pace_of_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gone on with at the end of the second of four epochs: 100 s an evaluation, 40 s an epoch of training."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    clock = iter((0.0, 5.0, 105.0, 109.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO), Stages() as stages:
        bar = stages.bar("student")
        bar.show({**VALUES, "share_done": 0.5}, 20, 2.0)
        bar.show(SCORES, 20, 2.0)
        bar.show({**VALUES, "share_done": 0.525}, 21, 2.1)
    assert caplog.messages[-1].endswith(f"  {duration(1.9 * 40 + 2 * 100)} left")


def test_durations_are_in_a_unit_that_suits_them() -> None:
    for seconds, text in ((40, "40 s"), (119, "119 s"), (600, "10 min"), (7199, "120 min"), (9000, "2.5 h")):
        assert duration(seconds) == text
