"""What Hydra keeps to itself: used in one file, and known to be as it was for this version alone."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

import distill_runner
from distill_runner.compose.hydra_private import combinations, parse_options

PACKAGE = Path(distill_runner.__file__).parent


def test_the_version_that_the_file_is_written_against() -> None:
    problem = "look through compose/hydra_private.py and tests/test_hydra_private.py before allowing another version"
    assert version("hydra-core").split(".")[:2] == ["1", "3"], problem


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE.parent / "hydra_plugins"])
def test_one_file_uses_private_names(folder: Path) -> None:
    private = re.compile(r"hydra\._internal|ConfigLoaderImpl|ConfigRepository|_apply_overrides|_value=")
    using = [file.name for file in folder.rglob("*.py") if private.search(file.read_text())]
    assert using == (["hydra_private.py"] if folder == PACKAGE else [])


def test_they_do_what_is_expected_of_them() -> None:
    known, behind = parse_options(["-m", "seed=1,2", "--config-dir", "own", "task=rte"])
    assert (known.multirun, known.config_dir, [*known.overrides, *behind]) == (True, "own", ["seed=1,2", "task=rte"])
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(["seed=1,2", "task=rte"])
    assert combinations(parsed) == [["seed=1", "task=rte"], ["seed=2", "task=rte"]]
    assert callable(ConfigLoaderImpl._apply_overrides_to_config)


def test_a_sweeper_can_be_made_whatever_was_imported_before_the_search_for_plugins() -> None:
    """The search executes the module of Hydra's sweeper once more: a class of before would not be the one of then."""
    lines = (
        "import distill_runner.sweeping.points",
        "from hydra.core.plugins import Plugins",
        "Plugins.instance()",
        "from hydra_plugins.distill_runner_grid.grid import GridSweeper",
        "GridSweeper()",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
