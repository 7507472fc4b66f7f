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
from distill_runner.common.terminal import Bar, Stages, duration

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
        bar = Bar(stages, "teacher")
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
    assert "left" in text
    assert "100%" in lines[-1]
    assert "left" not in lines[-1], "the stage has ended"


def test_the_losses_that_are_shown_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divergence in place of a term's loss did not: ce 0.4, kd divergence 0.003, loss 28."""
    text = shown(monkeypatch, 200, **{"kd/divergence": 0.0125})
    assert "loss 1.5000  ce 0.5000  kd 1.0000" in text
    assert "divergence" not in text


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", 0.0)
    clock = iter(range(5, 100, 5))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO), Stages({"teacher": 300.0, "student": 100.0}) as stages:
        bar = Bar(stages, "teacher")
        bar.show({**VALUES, "share_done": 0.2}, 2, 0.2)
        bar.show({**VALUES, "share_done": 0.4}, 4, 0.4)
        bar.show(SCORES, 10, 1.0)
    assert said.getvalue() == ""
    first, second, scores = caplog.messages
    assert first == "teacher   20 %  epoch 0.20  123 ex/s  loss 1.5000  ce 0.5000  kd 1.0000"
    assert re.match(r"teacher   40 %  epoch 0.40  \d+ s left \(all: \d+ s\)  123 ex/s  loss", second)
    left, whole = map(int, re.findall(r"(\d+) s", second))
    # The student's share of the work is a third of the teacher's, and the teacher has 0.6 of its own left.
    assert (whole - left) / left == pytest.approx(1 / 3 / 0.6, rel=0.05)
    assert scores == "teacher  epoch 1  accuracy 91.23"


def test_durations_are_in_a_unit_that_suits_them() -> None:
    for seconds, text in ((40, "40 s"), (119, "119 s"), (600, "10 min"), (7199, "120 min"), (9000, "2.5 h")):
        assert duration(seconds) == text


@pytest.mark.parametrize("parts", [(59.4, 59.4), (270.0, 190.0), (150.0, 150.0, 150.0), (7300.0, 9000.0)])
def test_a_total_of_rounded_parts_is_the_sum_of_their_texts(parts: tuple[float, ...]) -> None:
    """A plan said 7 min for 5 min and 3 min."""
    numbers = [float(duration(part).split()[0]) for part in parts]
    total = duration(sum(map(terminal.rounded, parts)))
    assert float(total.split()[0]) == pytest.approx(sum(numbers), abs=1e-9)
    assert total.split()[1] == duration(parts[0]).split()[1]


@pytest.mark.parametrize("width", [60, 100, 160])
def test_results_are_as_wide_as_the_terminal_and_80_columns_in_a_file(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    line = "  pretrain 9ef4e52ea7184545  64 s  corpus embedded: 12 layers x 64 from fresh; masked_lm and more " * 2
    assert terminal.output_width() == 80
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    terminal.show(line)
    lines = screen.getvalue().splitlines()
    assert " ".join(" ".join(lines).split()) == " ".join(line.split()), "words are whole"
    assert width - 12 < max(map(len, lines)) <= width == terminal.output_width()


def test_a_failure_leaves_no_bar_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    stages = Stages({"teacher": 1.0})
    Bar(stages, "teacher").show({**VALUES, "share_done": 0.5}, 5, 0.5)
    assert len(stages.rich.tasks) == 1  # type: ignore[union-attr]
    stages.__exit__(KeyboardInterrupt)
    assert stages.rich.tasks == []  # type: ignore[union-attr]
