"""What the program takes GPUs for, told by torch of machines that are not here."""

from types import SimpleNamespace

import pytest
import torch

from distill_runner.common.errors import UserError
from distill_runner.training import devices
from distill_runner.training.devices import Device

HOPPER, ADA, VOLTA, BLACKWELL = (9, 0), (8, 9), (7, 0), (12, 0)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_80", "sm_90"], HOPPER, True),
        (["sm_80", "sm_86"], ADA, True),  # the same generation, and newer
        (["sm_89"], (8, 6), False),  # the same generation, but older
        (["sm_80"], HOPPER, False),
        (["sm_80", "compute_80"], HOPPER, True),  # compiled by the driver
        (["sm_90", "compute_90"], ADA, False),
        (["sm_90a"], HOPPER, True),
        (["sm_90a", "compute_90a"], BLACKWELL, False),
        (["sm_75", "sm_120"], VOLTA, False),
        (["sm_75", "sm_120"], BLACKWELL, True),
        (["sm_100f"], (10, 3), True),
        (["sm_90", "compute_120"], (12, 1), True),
        ([], VOLTA, True),  # a build that does not say
        (["gfx90a"], HOPPER, False),
    ],
)
def test_a_gpu_without_kernels_is_refused(
    built: list[str], capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's rules: machine code within a generation, PTX for all that is newer."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_capability=lambda _: capability,
        get_arch_list=lambda: built,
        get_device_name=lambda _: "a GPU",
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    if runs:
        assert Device.from_name("cuda", "fp32").torch == torch.device("cuda", 0)  # with the number
    else:
        with pytest.raises(UserError, match="this torch has no kernels for a GPU"):
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
