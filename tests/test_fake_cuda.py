"""Runs ``tests/cuda`` on a fake device, in a process of its own: what torch finds at its first import, it keeps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fake_cuda import compiled
from fake_cuda.functions import FUNCTIONS

TESTS = Path(__file__).parent


def test_every_function_of_a_gpu_that_the_package_calls_is_replaced() -> None:
    source = "".join(file.read_text() for file in (TESTS.parent / "src").rglob("*.py"))
    used = {f"torch.cuda.{name}" for name in re.findall(r"\btorch\.cuda\.([a-z_]+)\(", source)}
    assert "torch.cuda.get_device_capability" in used
    assert used <= FUNCTIONS.keys()


@pytest.mark.fake_cuda
def test_what_a_gpu_would_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and tests/cuda has run on it")
    try:
        compiled()
    except RuntimeError as error:
        pytest.skip(f"the fake device cannot be compiled: {error}")
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "fake_cuda.plugin"]
    command = [sys.executable, *options, str(TESTS / "cuda")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent)
    print(ended.stdout[-5000:])
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout
    assert "skipped" not in ended.stdout
