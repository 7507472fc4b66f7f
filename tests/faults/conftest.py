"""What a campaign of faults came to, told at its end."""

from collections import Counter
from typing import Any

import pytest

COUNTED = Counter[str]()


@pytest.fixture(scope="session")
def tally() -> Counter[str]:
    """Faults by their kind, and what was lost by them."""
    return COUNTED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes, under pytest-xdist
        session.config.workeroutput["tally"] = dict(COUNTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNTED.update(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTED:
        figures = ", ".join(f"{number} {name}" for name, number in sorted(COUNTED.items()))
        terminalreporter.write_line(f"faults: {figures}")
