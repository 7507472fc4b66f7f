"""What the program takes GPUs for, told by torch of machines that are not here."""

from types import SimpleNamespace

import pytest
import torch

from distill_runner.common.errors import UserError
from distill_runner.training import devices
from distill_runner.training.devices import Device


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch has kernels for some generations of GPUs alone."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(UserError, match=r"this torch has no kernels for Tesla V100 \(CUDA error: no kernel image"):
        Device.from_name("cuda:0", "fp32")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("MIG-1c2d,MIG-GPU-8f/7/0", ["MIG-1c2d", "MIG-GPU-8f-7-0"]),  # names of lock files
        ("0,1", ["one", "one"]),
        ("MIG-1c2d", ["one", "one"]),
        ("", ["one", "one"]),
    ],
)
def test_slices_of_a_gpu_have_names_of_their_own(
    visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="one"))
    assert devices._visible_gpus() == names
