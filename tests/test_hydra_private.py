"""What Hydra keeps to itself: used in few places, and known to be as it was for this version alone."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser

import distill_runner
from distill_runner.compose.folders import config_folder

SOURCE = Path(distill_runner.__file__).parents[1]
PRIVATE = {"distill_runner/compose/command_line.py": ["hydra._internal"]}
"""Private names of Hydra and OmegaConf by file; the line that uses one says why."""


def test_the_version_that_they_are_of() -> None:
    problem = "look through the private names of Hydra before allowing another version"
    assert version("hydra-core").split(".")[:2] == ["1", "3"], problem


def test_private_names_stand_where_a_reason_is_given() -> None:
    pattern = re.compile(r"hydra\._internal|ConfigLoaderImpl|ConfigRepository|_get_node|omegaconf\.base\b|\._value\(")
    matches = {file.relative_to(SOURCE).as_posix(): pattern.findall(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert {file: names for file, names in matches.items() if names} == PRIVATE


def test_the_parser_divides_options_from_overrides_in_any_order() -> None:
    options, rest = get_args_parser().parse_known_args(["-m", "seed=1,2", "--config-dir", "own", "task=rte"])
    assert (options.multirun, options.config_dir, [*options.overrides, *rest]) == (
        True,
        "own",
        ["seed=1,2", "task=rte"],
    )


def test_a_sweeper_can_be_made_whatever_was_imported_before_the_search_for_plugins() -> None:
    """The search executes the modules of plugins once more: a class of before would not be the one of then."""
    lines = (
        "import distill_runner.sweeping.points",
        "from hydra.core.plugins import Plugins",
        "Plugins.instance()",
        "from hydra_plugins.distill_runner_grid.grid import GridSweeper",
        "GridSweeper()",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_no_defaults_list_names_a_choice_with_a_slash() -> None:
    """Hydra 1.4 reads ``recipe: a/b`` as the choice ``b`` in the group ``recipe/a``."""
    for file in config_folder().rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = content.get("defaults", []) if isinstance(content, dict) else []
        for entry in (entry for entry in entries if isinstance(entry, dict)):
            assert not any("/" in str(choice) for choice in entry.values()), file
