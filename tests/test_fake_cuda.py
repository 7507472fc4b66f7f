"""Runs ``tests/cuda`` on a fake device, in a process of its own: what torch finds at its first import, it keeps.

The functions of the fake device are compared with torch's own, whose calls of the driver are replaced.
"""

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_cuda import compiled
from fake_cuda.device import INTERCEPTED, REPLACED
from fake_cuda.functions import FUNCTIONS, table

TESTS = Path(__file__).parent
DEVICES = ("cuda", "cuda:0", "cuda:1", "cpu", torch.device("cuda"), torch.device("cuda:1"), 0, 1, -1, None)


def error_of(function: Any, *arguments: Any) -> type[BaseException] | None:
    """The type of the error that a call raises; None if it returns."""
    try:
        function(*arguments)
    except (ValueError, AssertionError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        return type(error)
    return None


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions find one GPU; the driver refuses others."""

    def set_device(index: int) -> None:
        if index >= 1:
            raise RuntimeError("CUDA error: invalid device ordinal")

    class Device:
        """As ``torch.cuda.device``: another current GPU within a context."""

        def __init__(self, device: Any) -> None:
            self.index = torch.cuda._utils._get_device_index(device, optional=True)

        def __enter__(self) -> None:
            set_device(self.index)

        def __exit__(self, *_: object) -> None:
            pass

    properties = SimpleNamespace(name="", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call, **_: call())
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda call, **_: call())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    monkeypatch.setattr(torch._utils, "_get_current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda _: properties, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", set_device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: None, raising=False)


@pytest.mark.parametrize(
    "name", ["set_device", "synchronize", "get_device_properties", "get_device_name", "get_device_capability"]
)
def test_the_fake_device_refuses_the_devices_that_torch_refuses(name: str, one_gpu: None) -> None:
    """A ``set_device`` that took everything hid that ``runtime.device=cuda`` ended every training run on a GPU."""
    fake, own = FUNCTIONS[f"torch.cuda.{name}"], getattr(torch.cuda, name)
    assert [error_of(fake, device) for device in DEVICES] == [error_of(own, device) for device in DEVICES]


def test_the_fake_device_refuses_the_random_states_that_torch_refuses(one_gpu: None) -> None:
    byte, wide = torch.zeros(3, dtype=torch.uint8), torch.zeros(16)
    for device in (0, "cuda:0", "cuda", 1, torch.device("cuda:1")):
        for state in (byte, wide):
            own = error_of(torch.cuda.set_rng_state, state, device)
            assert own is not None
            assert error_of(FUNCTIONS["torch.cuda.set_rng_state"], state, device) is own
        own = error_of(torch.cuda.get_rng_state, device)
        assert error_of(FUNCTIONS["torch.cuda.get_rng_state"], device) is own
    states = [FUNCTIONS["torch.cuda.get_rng_state"]()] * 2
    own = error_of(torch.cuda.set_rng_state_all, [torch.cuda.get_rng_state()] * 2)
    assert error_of(FUNCTIONS["torch.cuda.set_rng_state_all"], states) is own is IndexError


@pytest.mark.parametrize("name", [name for name in REPLACED if name not in ("torch.load", "threading.Thread.run")])
def test_the_fake_device_takes_the_arguments_that_torch_takes(name: str) -> None:
    """By name and order; ``torch.load`` passes its options on, and a thread has none."""
    own, fake = pkgutil.resolve_name(name), REPLACED[name]
    if own is fake:
        pytest.skip("the fake device is installed")
    try:
        signature = inspect.signature(own)
    except ValueError:  # a method in C++
        return
    parameters = inspect.signature(fake).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not passes_on:
        assert list(parameters) == list(signature.parameters)
    for own_parameter, parameter in zip(signature.parameters.values(), parameters.values(), strict=False):
        assert (own_parameter.default is own_parameter.empty) == (parameter.default is parameter.empty) or passes_on


def test_every_function_of_a_gpu_that_the_package_calls_is_replaced() -> None:
    source = "".join(file.read_text() for file in (TESTS.parent / "src").rglob("*.py"))
    used = {f"torch.cuda.{name}" for name in re.findall(r"\btorch\.cuda\.([a-z_]+)\(", source)}
    assert "torch.cuda.get_device_capability" in used
    assert used <= FUNCTIONS.keys()


def test_the_replaced_functions_are_those_of_the_page() -> None:
    """PYTHONPATH=tests python -m fake_cuda.functions prints the table."""
    page = (TESTS.parent / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert table({**REPLACED, **INTERCEPTED}) in page


@pytest.mark.fake_cuda
def test_what_a_gpu_would_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and tests/cuda has run on it")
    try:
        compiled()
    except RuntimeError as error:
        pytest.skip(f"the fake device cannot be compiled: {error}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "fake_cuda.plugin",
        str(TESTS / "cuda"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent)
    print(ended.stdout[-5000:])
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout
    assert "skipped" not in ended.stdout
