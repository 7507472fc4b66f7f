"""State of the whole process: each switch does what it says, and only two modules of ``common`` set one."""

import ast
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import distill_runner
from distill_runner.common import library_switches, process

SOURCES = Path(distill_runner.__file__).parents[1]
MODULES = (Path(process.__file__), Path(library_switches.__file__))
SETTERS = re.compile(
    r"os\.environ\.(setdefault|update|pop)|os\.(chdir|putenv|sched_setaffinity|_exit|umask|nice|dup2)"
    r"|gc\.(disable|enable|freeze|unfreeze|collect|set_threshold)|signal\.(signal|alarm|setitimer)"
    r"|sys\.path\.(insert|append|remove)|torch\.(set_(num|flush|float32|default)_\w+|use_deterministic_algorithms)"
    r"|torch\.set_printoptions|(multiprocessing|context)\.set_(start_method|forkserver_preload)"
    r"|csv\.field_size_limit|ctypes\.CDLL|set_client_factory|warnings\.filterwarnings|logging\.disable"
    r"|faulthandler\.enable|resource\.setrlimit"
)
"""Calls that change the state of a process."""
ASSIGNED = (
    "os.environ[",
    "torch.backends.",
    "torch._dynamo.config.",
    "datasets.config.",
    "functional.",
    "os._exit",
    "sys.excepthook",
)
"""Beginnings of what assignments change."""


def test_no_other_module_sets_a_switch() -> None:
    others = []
    for file in sorted(SOURCES.rglob("*.py")):
        if file in MODULES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            if isinstance(node, ast.AugAssign):
                targets = [node.target]
            changes = [ast.unparse(target) for target in targets]
            calls = SETTERS.fullmatch(ast.unparse(node.func)) if isinstance(node, ast.Call) else False
            if calls or any(change.startswith(ASSIGNED) for change in changes):
                others.append(f"{file.relative_to(SOURCES)}: {ast.unparse(node)}")
    assert others == []


def test_every_switch_is_in_the_table() -> None:
    page = (SOURCES.parent / "docs" / "architecture.md").read_text()
    section = page.partition("## Process-wide state")[2].partition("\n## ")[0]
    nodes = [node for module in MODULES for node in ast.parse(module.read_text()).body]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    sets_nothing = {"output_error", "num_launched", "available_cpus"}
    assert functions - sets_nothing == {*re.findall(r"^\|[^|]+\| `(\w+)` \|", section, re.MULTILINE)}


def test_a_variable_is_as_before_after_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTILL_TEST", raising=False)
    with process.environment_variable("DISTILL_TEST", "1"):
        assert os.environ["DISTILL_TEST"] == "1"
        with pytest.raises(KeyError), process.environment_variable("DISTILL_TEST", "2"):
            raise KeyError
        assert os.environ["DISTILL_TEST"] == "1"
    assert "DISTILL_TEST" not in os.environ


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_sigterm_interrupts_within_the_context(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), process.sigterm_as_interrupt():
        signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_working_folder_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for _ in range(2):
        process.import_from_working_folder()
    assert sys.path.count(str(tmp_path)) == 1
