"""What a campaign of faults came to, told at its end."""

from collections import Counter

import pytest

COUNTED = Counter[str]()


@pytest.fixture(scope="session")
def tally() -> Counter[str]:
    """Faults by their kind, and what was lost by them."""
    return COUNTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTED:
        figures = ", ".join(f"{number} {name}" for name, number in sorted(COUNTED.items()))
        terminalreporter.write_line(f"faults: {figures}")
