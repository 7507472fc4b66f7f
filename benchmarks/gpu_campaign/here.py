"""What torch says of the GPUs, and what the program concludes: part ``here`` of the campaign."""

import platform

import torch
import transformers

from distill_runner.models.attention import _has_kernels
from distill_runner.training.config import Precision
from distill_runner.training.devices import Device

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")


def gpu_lines() -> list[str]:
    """Return a line for each GPU: name, compute capability and, where torch knows it, the memory."""
    lines = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        lines.append(f"cuda:{number} {torch.cuda.get_device_name(number)}, sm_{major}{minor}")
        if torch.version.cuda:
            properties = torch.cuda.get_device_properties(number)
            lines[-1] += f", {properties.total_memory >> 30} GiB, {properties.uuid}"
    return lines


def main() -> None:
    print(f"Python {platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda})")
    print(f"transformers {transformers.__version__}; kernels for {', '.join(torch.cuda.get_arch_list()) or 'unknown'}")
    print("\n".join(gpu_lines()))
    for precision in PRECISIONS:
        print(f"runtime.device=cuda runtime.precision={precision}: {Device.from_name('cuda', precision).torch}")
    first = Device.from_name("cuda", "bf16").torch
    print("flash attention without padding:", "there are kernels" if _has_kernels(first) else "no kernels, so padded")
    value = torch.ones(3, device=first).sum().item()
    assert value == 3, f"the sum of three ones is {value}"


if __name__ == "__main__":
    main()
