"""Tests that a configuration file from somebody else runs no code."""

from pathlib import Path

import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.typed_input import check_files

CALLS = {
    "callback": "hydra:\n  callbacks:\n    x: {_target_: shutil.copyfile, src: a, dst: b}\n",
    "logging": "hydra:\n  job_logging:\n    handlers: {x: {(): shutil.copyfile, src: a, dst: b}}\n",
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


def test_installed_launchers_may_be_chosen(tmp_path: Path) -> None:
    """A cluster's own launcher settings would be refused."""
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    file = tmp_path / "hydra" / "launcher" / "mine.yaml"
    file.write_text("_target_: hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher\n")
    check_files(tmp_path)
    file.write_text("_target_: shutil.copyfile\n")
    with pytest.raises(UserError, match="would call code"):
        check_files(tmp_path)
