"""What dependencies keep to themselves: used in few places, and checked for the versions that are allowed."""

import importlib
import re
from importlib.metadata import version
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

import distill_runner
from distill_runner.compose.folders import config_folder
from distill_runner.sweeping.sweep import SLURM_LAUNCHER
from helpers import processes

SOURCE = Path(distill_runner.__file__).parents[1]
PRIVATE = {
    "commands/dashboard.py": "_model",
    "compose/command_line.py": "_internal",
    "models/attention.py": "_flash_attention_forward",
    "models/features.py": "_supports_attention_backend",
    "training/devices.py": "_foreach_copy_",
    "training/graphs.py": "_cuda_endAllocateToPool",
}
"""Private names of dependencies by file, at most six; the line that uses one says why, and a test fails without it."""
PUBLIC = {"_replace", "_exit"}
"""Documented in spite of their names: of named tuples, and of ``os``."""


def test_the_version_that_they_are_of() -> None:
    problem = "look through the private names of Hydra before allowing another version"
    assert version("hydra-core").split(".")[:2] == ["1", "3"], problem


def test_private_names_stand_where_a_reason_is_given() -> None:
    """A private name is one of a dependency unless its own file defines it."""
    private = re.compile(r"(?<!self)(?<!cls)\.(_[a-z]\w*)|attr\([^)]*\"(_[a-zA-Z]\w*)|import .*\b(_[a-z]\w*)")
    names = dict[str, str]()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for line in text.splitlines():
            for match in private.finditer(line.partition("  #")[0]):
                name = next(filter(None, match.groups()))
                if name in PUBLIC or re.search(rf"def {name}\b|\.{name} = ", text):
                    continue
                assert "# private: " in line, line
                names[file.relative_to(SOURCE / "distill_runner").as_posix()] = name
    assert names == PRIVATE
    assert not any(re.search(r"ConfigLoaderImpl|omegaconf\.base\b", file.read_text()) for file in SOURCE.rglob("*.py"))


def test_the_launcher_for_slurm_is_the_one_whose_class_is_asked_for() -> None:
    launcher = yaml.safe_load((config_folder() / "hydra/launcher/submitit_slurm.yaml").read_text(encoding="utf-8"))
    assert launcher["_target_"].endswith(f".{SLURM_LAUNCHER}")


def test_the_parser_divides_options_from_overrides_in_any_order() -> None:
    options, rest = get_args_parser().parse_known_args(["-m", "seed=1,2", "--config-dir", "own", "task=rte"])
    assert (options.multirun, options.config_dir, [*options.overrides, *rest]) == (
        True,
        "own",
        ["seed=1,2", "task=rte"],
    )


def test_a_sweeper_can_be_made_whatever_was_imported_before_the_search_for_plugins() -> None:
    """The search executes the modules of plugins once more: a class of before would not be the one of then."""

    def searched_again() -> None:
        Singleton._instances.pop(Plugins, None)
        Plugins.instance()
        importlib.import_module("hydra_plugins.distill_runner_grid.grid").GridSweeper()

    importlib.import_module("distill_runner.sweeping.points")
    processes.finish(processes.start(searched_again))


def test_no_defaults_list_names_a_choice_with_a_slash() -> None:
    """Hydra 1.4 reads ``recipe: a/b`` as the choice ``b`` in the group ``recipe/a``."""
    for file in config_folder().rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = content.get("defaults", []) if isinstance(content, dict) else []
        for entry in (entry for entry in entries if isinstance(entry, dict)):
            assert not any("/" in str(choice) for choice in entry.values()), file
