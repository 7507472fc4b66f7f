"""Subcommands of the console script: dispatch, closed pipes, and tab completion in real shells."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill_runner import cli
from distill_runner.commands.completion import script
from distill_runner.commands.parser import SHELLS, SUBCOMMANDS, subcommand_of
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
        (["completion", "bash"], {"torch", "numpy", "hydra", "omegaconf", "pydantic", "matplotlib"}),
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


# Tab completion, typed into a real shell

STARTUP = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
SETTINGS = {
    "bash": "bind 'set bell-style none'; bind 'set enable-bracketed-paste off'",
    "zsh": "unsetopt beep; unset zle_bracketed_paste; zstyle ':completion:*' insert-tab false",
}
TYPED = {
    "tab\t": "[table]",
    "an\tag\t": "[analyze][agreement]",
    "table --form\tla\t": "[table][--format][latex]",
    "store de\t--unu\t": "[store][delete][--unused]",
    "completion z\t": "[completion][zsh]",
    "predict mine\t": "[predict][mine.csv]",
    "task=rt\t": "[task=rte]",
    "-m task=rte method=al\t": "[-m][task=rte][method=alp]",
    "optim.l\t5e-5 loss.te\t7": "[optim.lr=5e-5][loss.temperature=7]",
}
"""What is typed after ``distill-run``, and the arguments that it then has."""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a ``distill-run`` that answers completion as the real one, and else prints its arguments."""
    program = tmp_path / "bin" / "distill-run"
    program.parent.mkdir()
    real = f'PYTHONPATH={SOURCE} exec {sys.executable} -c "{PROGRAM}" "$@"'
    program.write_text(f'#!/bin/sh\n[ "$1" = -sc ] && {real}\nprintf "[%s]" "$@"; echo END\n')
    program.chmod(0o755)
    return program.parent


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.slow
def test_completion_in_a_real_shell(shell: str, stand_in: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (apt-get install {shell})")
    (tmp_path / "mine.csv").touch()
    (tmp_path / "completion").write_text(script(shell))
    master, slave = pty.openpty()
    path = f"{stand_in}{os.pathsep}{os.environ['PATH']}"
    variables = environment(PATH=path, TERM="dumb", PS1="PROMPT ", HISTFILE="", HOME=str(tmp_path))
    with subprocess.Popen(
        STARTUP[shell], stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=variables, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            os.write(master, f'{SETTINGS[shell]}; . ./completion; echo READ""Y\n'.encode())
            read_until(master, "READY\r\n")
            for typed, arguments in TYPED.items():
                read_until(master, "PROMPT ")
                os.write(master, f"distill-run {typed}\n".encode())
                assert arguments in read_until(master, "END\r\n"), typed
        finally:
            process.kill()
            os.close(master)


def read_until(terminal: int, mark: str) -> str:
    """Return what a terminal prints up to ``mark``."""
    printed, limit = "", time.monotonic() + 60
    while mark not in printed:
        assert time.monotonic() < limit, printed
        if select.select([terminal], [], [], 1)[0]:
            printed += os.read(terminal, 1).decode(errors="replace")
    return printed
