"""Cells of every table, read from the papers a second time."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from distill_runner.report.published import cells

READ_TWICE = yaml.safe_load(Path(__file__).with_name("published_read_twice.yaml").read_text())


@pytest.mark.parametrize(("paper", "table", "value", "at"), READ_TWICE)
def test_read_a_second_time(paper: str, table: str, value: str, at: dict[str, Any]) -> None:
    described = ((cell, {**cell.model_dump(), **cell.variant}) for cell in cells(paper) if cell.table == table)
    values = [str(cell.value) for cell, known in described if at.items() <= known.items()]
    assert values == [value]
