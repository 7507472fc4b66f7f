"""The functions of ``torch.cuda`` that the fake device replaces, with the arguments and errors of the real ones.

They refuse what torch's own refuse, such as a device without a number.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.cuda._utils import _get_device_index

from fake_cuda import graphs

CAPABILITY = [9, 0]
STATE_BYTES = 16
_STATES = dict[int, Tensor]()
"""The state of each GPU's generator."""


def _index(device: Any, optional: bool = False) -> int:
    """Return the number of a GPU by torch's own rule: some functions take the current GPU, others need a number."""
    device = torch.device(device) if isinstance(device, str) else device
    if optional and (device is None or (isinstance(device, torch.device) and device.index is None)):
        device = device if device is not None and device.type != "cuda" else 0
    return _get_device_index(device)


def _require(index: int) -> None:
    """Raise what the driver raises if there is no such GPU."""
    if index >= torch.cuda.device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")


def _generator(device: Any) -> int:
    """Return the number of the GPU whose generator torch takes from its tuple of generators."""
    return range(torch.cuda.device_count())[_index(device, optional=True)]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """The GPU has bf16, as those since Ampere have."""
    return including_emulation or CAPABILITY[0] >= 8


def set_device(device: Any) -> None:
    """A device without a number, of another type, or that is not there is an error; a negative number does nothing."""
    if (index := _index(device)) >= 0:
        _require(index)


def synchronize(device: Any = None) -> None:
    """A device of another type, or that is not there, is an error; the CPU has always finished."""
    graphs.forbid("synchronize")
    _require(_index(device, optional=True))


def get_device_properties(device: Any = None) -> Any:
    """A device of another type, or that is not there, is an error; the result has a UUID, a name and a capability."""
    index = _index(device, optional=True)
    if not 0 <= index < torch.cuda.device_count():
        raise AssertionError("Invalid device id")
    major, minor = CAPABILITY
    return SimpleNamespace(uuid=f"fake-{index}", name="fake GPU", major=major, minor=minor)


def get_device_name(device: Any = None) -> str:
    """The name of `get_device_properties`, with its errors."""
    return str(get_device_properties(device).name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The capability of `get_device_properties`, with its errors."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_rng_state(device: Any = "cuda") -> Tensor:
    """The state of one GPU's generator, 16 bytes on the CPU; a GPU that is not there is an error."""
    graphs.forbid("get_rng_state")
    return _STATES.setdefault(_generator(device), torch.zeros(STATE_BYTES, dtype=torch.uint8)).clone()


def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
    """A state that is on a GPU, of another type than bytes, or of another size than 16, is an error."""
    graphs.forbid("set_rng_state")
    index = _generator(device)
    if new_state.device.type != "cpu" or new_state.dtype != torch.uint8:
        raise TypeError("RNG state must be a torch.ByteTensor")
    if new_state.numel() != STATE_BYTES:
        raise RuntimeError("RNG state is wrong size")
    _STATES[index] = new_state.clone()


def manual_seed(seed: int) -> None:
    """The generator of the current GPU starts at the seed."""
    graphs.forbid("manual_seed")
    _STATES[torch.cuda.current_device()] = torch.tensor([int(seed) % 2**63, 0]).view(torch.uint8)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"torch.cuda.{function.__name__}": function
    for function in (
        *(set_device, synchronize, manual_seed, get_rng_state, set_rng_state),
        *(get_device_properties, get_device_name, get_device_capability, is_bf16_supported),
        *(graphs.graph, graphs.empty_cache, graphs.is_current_stream_capturing),
    )
} | {
    "torch._C._cuda_endAllocateToPool": graphs.end_allocate_to_pool,
    "torch.accelerator.current_accelerator": lambda check_available=False: torch.device("cuda"),
    "torch.accelerator.current_stream": lambda: SimpleNamespace(is_capturing=graphs.is_current_stream_capturing),
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.is_initialized": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda._lazy_init": lambda: None,
    "torch.cuda.manual_seed_all": manual_seed,
    "torch.cuda.graph_pool_handle": list,  # of the graphs that share it
    "torch.cuda.Stream": graphs.Stream,
    "torch.cuda.stream": graphs.on_stream,
    "torch.cuda.current_stream": lambda: graphs.CUDAGraph.stream,
    "torch.cuda.set_stream": lambda stream: setattr(graphs.CUDAGraph, "stream", stream),
}
"""By the name of the function that is replaced."""
