"""What Hydra keeps to itself: used in one file, and known to be as it was for this version alone."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, base, flag_override

import distill_runner
from distill_runner.compose import resolvers
from distill_runner.compose.command_line import _has_open_mode
from distill_runner.compose.folders import choices, config_folder, is_choice
from distill_runner.compose.hydra_private import combinations, parse_options

PACKAGE = Path(distill_runner.__file__).parent


def test_the_version_that_the_file_is_written_against() -> None:
    problem = "look through compose/hydra_private.py and tests/test_hydra_private.py before allowing another version"
    assert version("hydra-core").split(".")[:2] == ["1", "3"], problem


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE.parent / "hydra_plugins"])
def test_one_file_uses_private_names(folder: Path) -> None:
    private = re.compile(r"hydra\._internal|ConfigLoaderImpl|ConfigRepository|_apply_overrides|\b_value=|base\.parse")
    using = [file.name for file in folder.rglob("*.py") if private.search(file.read_text())]
    assert using == (["hydra_private.py"] if folder == PACKAGE else [])


def test_they_do_what_is_expected_of_them() -> None:
    known, behind = parse_options(["-m", "seed=1,2", "--config-dir", "own", "task=rte"])
    assert (known.multirun, known.config_dir, [*known.overrides, *behind]) == (True, "own", ["seed=1,2", "task=rte"])
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(["seed=1,2", "task=rte"])
    assert combinations(parsed) == [["seed=1", "task=rte"], ["seed=2", "task=rte"]]
    assert callable(ConfigLoaderImpl._apply_overrides_to_config)


@pytest.mark.parametrize(
    ("arguments", "is_open"),
    [
        (["task=rte", "method=alp"], False),
        (["-m", "experiment=demo"], False),
        (["experiment=demo"], True),
        (["+experiment=demo"], True),
        (["task=rte", "hydra.mode=MULTIRUN"], True),
        (["--cfg", "job", "sweep=alp_kd/table1"], True),
    ],
)
def test_only_an_experiment_may_say_that_a_command_is_a_sweep(
    arguments: list[str], is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _has_open_mode(arguments) == is_open
    (tmp_path / "conf" / "task").mkdir(parents=True)
    assert _has_open_mode(arguments) or "-m" in arguments  # of which a file may do so


def test_files_of_no_other_group_set_the_mode() -> None:
    """A command without these is not composed to find out whether it is a sweep."""
    for file in config_folder().rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "mode" in (content.get("hydra") or {}):
            assert file.relative_to(config_folder()).parts[0] in ("experiment", "sweep")


@pytest.mark.parametrize(("arguments", "compositions"), [(["task=sst2"], 1), (["task=sst2", "hydra.verbose=false"], 2)])
def test_a_command_is_composed_and_its_files_are_read_as_often_as_it_must(
    arguments: list[str], compositions: int, tmp_path: Path
) -> None:
    """In a process of its own, since Hydra sets up logging. The last line has the numbers of both."""
    lines = (
        "import sys, yaml",
        "from hydra._internal.hydra import Hydra",
        "from distill_runner.hydra_app import compose_and_run, _run_single",
        "import distill_runner.hydra_app as app",
        "counts = {'compose_config': [], 'load': []}",
        "def counted(owner, name):",
        "    original = getattr(owner, name)",
        "    def call(*args, **kwargs):",
        "        counts[name].append(getattr(args[0], 'name', ''))",
        "        return original(*args, **kwargs)",
        "    setattr(owner, name, call)",
        "counted(Hydra, 'compose_config'), counted(yaml, 'load')",
        "app._run_single = app._run_point = lambda config: {}",
        f"compose_and_run({arguments!r})",
        "print(len(counts['compose_config']), len(counts['load']) - len({*counts['load']}))",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{compositions} 0"


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


def test_a_text_that_is_parsed_once_is_resolved_for_each_configuration() -> None:
    resolvers.register()
    resolvers.register()
    made = [OmegaConf.create({"a": number, "b": "${a}", "c": "1 of ${multiply:${a},2}"}) for number in (3, 4)]
    assert [(config.b, config.c) for config in made] == [(3, "1 of 6"), (4, "1 of 8")]
    assert base.parse.cache_info().hits > 0  # type: ignore[attr-defined]
    assert not hasattr(base.parse.__wrapped__, "cache_info"), "a cache of a cache"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "overrides",
    [
        ["task=rte", "method=alp"],
        ["experiment=demo_methods", "method=takd", "student=fresh_tiny", "optim.lr=1e-4"],
        ["task=stsb", "method=pdf", "hydra/launcher=basic", "tracker=wandb", "+stages.teacher.select=last"],
    ],
)
def test_what_is_composed_faster_is_the_same(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and their order, with interpolations and without; the originals are those that ``wraps`` names."""
    resolvers.register()

    def composed() -> list[str]:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose("config", overrides, return_hydra_config=True)
        with flag_override(config, "readonly", False):
            config.hydra.runtime.output_dir = "outputs"
        return [OmegaConf.to_yaml(config), OmegaConf.to_yaml(config.stages, resolve=True)]

    faster = composed()
    for owner, name in ((ConfigLoaderImpl, "_embed_result_config"), (defaults_list, "_create_interpolation_map")):
        original = getattr(owner, name).__wrapped__
        monkeypatch.setattr(owner, name, staticmethod(original) if owner is ConfigLoaderImpl else original)
    assert composed() == faster


def test_a_choice_is_what_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "task" / "of").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "of" / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    names = choices("task")
    assert {"rte", "of/mine"} <= {*names}
    assert all(is_choice("task", name) for name in names)
    assert not is_choice("task", "mine")
    assert not is_choice("method", "rte")
