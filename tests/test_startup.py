"""How much of this program runs before the first update: what somebody reads who follows one run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUNCTIONS, FILES, CALLS = 550, 100, 20_000
"""Limits: named functions of this package that are entered, the files that they are in, and all calls."""
PROGRAM = """
import collections, pathlib, sys, threading
import torch
import distill_runner
from distill_runner.cli import main

source, calls = str(pathlib.Path(distill_runner.__file__).parent), collections.Counter()

class FirstUpdate(BaseException):
    pass

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(source) and code.co_flags & 1:  # no body of a class or module
        calls[code] += 1

def step(*_, **__):
    raise FirstUpdate

torch.optim.Optimizer.step = torch.optim.AdamW.step = step
threading.setprofile(profile)
sys.setprofile(profile)
try:
    main()
except FirstUpdate:
    sys.setprofile(None)
    named = [code for code in calls if not code.co_name.startswith("<")]
    print(len(named), len({code.co_filename for code in named}), calls.total())
"""


@pytest.mark.real
@pytest.mark.skipif("DISTILL_DATA_DIR" not in os.environ, reason="takes GLUE in DISTILL_DATA_DIR")
def test_a_run_reaches_its_first_update_in_few_functions(tmp_path: Path) -> None:
    options = ("task=rte", "method=alp", "teacher=minilm_l6", "runtime.threads=1", "runtime.device=cpu")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DISTILL_STORE_DIR": str(tmp_path / "store")},
    )
    assert ended.returncode == 0, ended.stderr
    functions, files, calls = map(int, ended.stdout.splitlines()[-1].split())
    assert functions <= FUNCTIONS
    assert files <= FILES
    assert calls <= CALLS
