"""What Hydra keeps to itself: used in one file, and known to be as it was for this version alone."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import distill_runner
from distill_runner.compose import resolvers
from distill_runner.compose.folders import config_folder
from distill_runner.compose.hydra_private import combinations, parse_options

PACKAGE = Path(distill_runner.__file__).parent


def test_the_version_that_the_file_is_written_against() -> None:
    problem = "look through compose/hydra_private.py and tests/test_hydra_private.py before allowing another version"
    assert version("hydra-core").split(".")[:2] == ["1", "3"], problem


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE.parent / "hydra_plugins"])
def test_one_file_uses_private_names(folder: Path) -> None:
    private = re.compile(r"hydra\._internal|ConfigLoaderImpl|ConfigRepository|_apply_overrides|\b_value=")
    using = [file.name for file in folder.rglob("*.py") if private.search(file.read_text())]
    assert using == (["hydra_private.py"] if folder == PACKAGE else [])


def test_they_do_what_is_expected_of_them() -> None:
    known, behind = parse_options(["-m", "seed=1,2", "--config-dir", "own", "task=rte"])
    assert (known.multirun, known.config_dir, [*known.overrides, *behind]) == (True, "own", ["seed=1,2", "task=rte"])
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(["seed=1,2", "task=rte"])
    assert combinations(parsed) == [["seed=1", "task=rte"], ["seed=2", "task=rte"]]
    assert callable(ConfigLoaderImpl._apply_overrides_to_config)


@pytest.mark.slow
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


def test_no_defaults_list_names_a_choice_with_a_slash() -> None:
    """Hydra 1.4 reads ``recipe: a/b`` as the choice ``b`` in the group ``recipe/a``."""
    for file in config_folder().rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = content.get("defaults", []) if isinstance(content, dict) else []
        for entry in (entry for entry in entries if isinstance(entry, dict)):
            assert not any("/" in str(choice) for choice in entry.values()), file


def test_resolvers_are_registered_by_the_function_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf 2.4 warns of the old name; in 2.3, the new name is that of an older function."""
    calls = list[tuple[str, bool]]()

    def register_resolver(name: str, resolver: Any, *, replace: bool, annotation_validation: str = "warn") -> None:
        calls.append((name, replace))

    monkeypatch.setattr(OmegaConf, "register_resolver", register_resolver, raising=False)
    resolvers.register()
    assert ("beta", True) in calls
