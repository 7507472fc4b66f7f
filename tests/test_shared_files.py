"""Tests that a configuration file from somebody else runs no code."""

from pathlib import Path

import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.typed_input import check_files

CALLS = {
    "callback": "hydra:\n  callbacks:\n    x: {_target_: shutil.copyfile, src: a, dst: b}\n",
    "logging": "hydra:\n  job_logging:\n    handlers: {x: {(): shutil.copyfile, src: a, dst: b}}\n",
    "class": "hydra:\n  job_logging:\n    handlers: {x: {class: subprocess.Popen, args: [touch, taken]}}\n",
    "class by reference": "a: b\nhydra:\n  job_logging:\n    handlers: {x: {class: '${a}'}}\n",
    "object": "hydra:\n  job_logging:\n    handlers: {x: {class: logging.StreamHandler, stream: ext://theirs.y}}\n",
    "environment": "hydra:\n  job:\n    env_set: {PYTHONPATH: theirs}\n",
    "script": "hydra:\n  launcher:\n    setup: [touch taken]\n",
    "quoted": 'hydra:\n  callbacks:\n    x: {"\\x5ftarget_": shutil.copyfile}\n',
    "alias": "a: &a {_target_: shutil.copyfile}\nhydra:\n  callbacks:\n    x: *a\n",
    "made": "hydra:\n  callbacks: ${oc.create:${a}${b}}\n",
    "decoded": 'hydra:\n  callbacks: "${oc.decode:${a}}"\n',
    "elsewhere": "hydra:\n  searchpath: [file:///tmp/other]\n",
}


@pytest.mark.parametrize("name", CALLS)
def test_files_that_call_code_are_refused(tmp_path: Path, name: str) -> None:
    """Whoever runs a colleague's experiment would run the colleague's code."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text(f"# @package _global_\n{CALLS[name]}")
    with pytest.raises(UserError, match="would call code"):
        check_files(tmp_path)


def test_files_behind_a_link_are_checked(tmp_path: Path) -> None:
    """Hydra follows links between folders."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.yaml").write_text(CALLS["callback"])
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    (tmp_path / "theirs" / "experiment" / "loop").symlink_to(tmp_path / "theirs")
    check_files(tmp_path / "theirs")
    (tmp_path / "theirs" / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="would call code"):
        check_files(tmp_path / "theirs")


def test_plain_logging_may_be_set(tmp_path: Path) -> None:
    handlers = "handlers: {x: {class: logging.FileHandler, filename: a.log}, y: {stream: ext://sys.stderr}}"
    (tmp_path / "x.yaml").write_text(f"hydra:\n  job_logging:\n    {handlers}\ntask: {{class: {{a: 1}}}}\n")
    check_files(tmp_path)


def test_installed_launchers_may_be_chosen(tmp_path: Path) -> None:
    """A cluster's own launcher settings would be refused."""
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    file = tmp_path / "hydra" / "launcher" / "mine.yaml"
    file.write_text("_target_: hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher\n")
    check_files(tmp_path)
    file.write_text("_target_: shutil.copyfile\n")
    with pytest.raises(UserError, match="would call code"):
        check_files(tmp_path)
