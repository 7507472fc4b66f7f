"""Subcommands of the console script: dispatch, closed pipes, and tab completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distill_runner import cli
from distill_runner.commands.parser import SUBCOMMANDS, subcommand_of
from distill_runner.common.errors import UserError
from helpers.command import distill_run
from helpers.fake_results import result, run_folder

SOURCE = Path(cli.__file__).parents[1]
PROGRAM = "import sys; sys.argv[0] = 'distill-run'; from distill_runner.cli import main; main()"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), **changes}


# Dispatch


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["table", "--task", "rte"], "table"),
        (["task=rte", "table"], None),
        (["table=1"], None),
        (["-m", "table"], None),
        ([], None),
    ],
)
def test_a_first_word_is_a_subcommand(arguments: list[str], name: str | None) -> None:
    assert subcommand_of(arguments) == name


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'table'"):
        subcommand_of(["tabel"])
    ended = distill_run(tmp_path, "tabel")
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 2


def test_each_has_help(tmp_path: Path) -> None:
    overview = distill_run(tmp_path, "--help").out
    for name in SUBCOMMANDS:
        assert distill_run(tmp_path, name, "--help").out.startswith(f"usage: distill-run {name} ")
        assert f"  distill-run {name} " in overview


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["table", "--help"], {"torch", "numpy", "hydra", "omegaconf", "pydantic", "matplotlib"}),
        (["--version"], {"torch", "numpy", "hydra", "omegaconf", "pydantic", "matplotlib"}),
        (["task=rte", "--cfg", "job"], {f"distill_runner.commands.{name}" for name in ("table", "analyze", "export")}),
    ],
)
def test_a_run_and_a_subcommand_do_not_import_each_other(arguments: list[str], forbidden: set[str]) -> None:
    program = f"import atexit, sys; atexit.register(lambda: print({forbidden} & set(sys.modules), file=sys.stderr))"
    command = [sys.executable, "-c", f"{program}; {PROGRAM}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert ended.stderr.splitlines()[-1] == "set()"


# Output that cannot be written


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    for method in ("alp", "rkd"):
        run_folder(tmp_path / "runs", method, result=result(method=method), status=result(method=method))
    return tmp_path


def run_with(output: int, command: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", PROGRAM, *command.split()]
    pipe = subprocess.PIPE
    return subprocess.run(
        arguments, stdout=output, stderr=pipe, text=True, cwd=folder, env=environment(**changes), check=False
    )


@pytest.mark.parametrize("command", ["task=rte --cfg job", "table runs"])
def test_a_closed_pipe_is_no_error(command: str, runs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_with(writer, command, runs)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_disk_is_told_once(runs: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = run_with(full.fileno(), "store --store store", runs)
    assert (ended.returncode, ended.stderr) == (1, "standard output: No space left on device\n")


# Tab completion


@pytest.mark.slow
def test_the_tab_completion_of_hydra_works_in_bash(tmp_path: Path) -> None:
    program = tmp_path / "distill-run"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    script = """eval "$(distill-run -sc install=bash)"
        COMP_LINE="distill-run -m task=rte optim.l"; COMP_CWORD=3; hydra_bash_completion; echo "${COMPREPLY[@]}" """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env=environment(PATH=path)
    )
    assert ended.stdout == "optim.lr=\n"
