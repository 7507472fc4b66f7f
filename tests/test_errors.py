"""Words of errors: how a process ended, values as they are typed, a full disk; and processes that outlive none."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from distill_runner.common.errors import exit_cause, format_value
from distill_runner.common.files import resource_error
from distill_runner.common.hub import hub_error

CHILD = """import time
from distill_runner.common.process import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""import subprocess, sys
child = subprocess.Popen([sys.executable, "-O", "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
"""


def test_a_working_folder_that_was_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        Path.cwd()
    assert str(resource_error(caught.value)) == "working folder: has been deleted\n  Change to another folder: cd"


@pytest.mark.parametrize(
    ("exitcode", "name"),
    [(3, "exited with code 3"), (-9, "SIGKILL: out of memory"), (-15, "SIGTERM"), (-35, "signal 35")],
)
def test_how_a_process_ended(exitcode: int, name: str) -> None:
    assert name in exit_cause(exitcode)


@pytest.mark.parametrize(
    ("value", "typed"),
    [(1e-5, "1e-05"), (2.0, "2"), (0.1, "0.1"), (0.1234567, "0.1234567"), (1234567.0, "1234567.0"), ([0.5], "[0.5]")],
)
def test_numbers_keep_all_their_digits(value: object, typed: str) -> None:
    assert format_value(value) == typed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_no_fault_of_the_hub(number: int) -> None:
    error = RuntimeError("while downloading")
    error.__cause__ = OSError(number, "full")
    with pytest.raises(OSError, match="full"):
        hub_error(error, "model", "acme/tiny", None)


def test_a_process_without_assertions_ends_with_its_parent() -> None:
    # The call returns when the child has closed the pipe of its errors.
    ended = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
