"""One CUDA device without a GPU, whose tensors have real values, computed by the CPU.

    PYTHONPATH=tests python -m pytest -p fake_cuda.plugin tests/cuda

It is as strict as CUDA: tensors of two devices do not meet in an operation. ``COUNTS`` counts kernel launches, copies
to the device and whatever makes the host wait for it. ``guard.cpp`` is compiled at first use, and loaded before torch
looks for devices. Time is that of the CPU and says nothing; nor do memory and the order of sums.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

GUARD = Path(__file__).with_name("guard.cpp")


def compiled() -> Path:
    """The guard as a library, compiled by $CXX or c++ against the installed torch.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    version = (torch_folder / "version.py").read_text()
    name = hashlib.sha256(f"{torch_folder}{version}{GUARD.read_text()}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"distill-run-fake-cuda-{os.getuid()}-{name}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
        link = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
        command = [os.environ.get("CXX", "c++"), "-O1", "-shared", "-fPIC", "-std=c++20", *include, str(GUARD)]
        try:
            subprocess.run([*command, "-o", str(unfinished), *link], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"{command[0]}: {getattr(error, 'stderr', error)}"[:2000]) from error
        unfinished.rename(library)
    return library


class Counts:
    """What a GPU would have been asked to do, by operation, and where it makes the host wait."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.launches, self.copies, self.waits = Counter[str](), Counter[str](), Counter[str]()


COUNTS = Counts()


@cache
def load() -> None:
    """Make ``cuda:0`` be there for the rest of the process."""
    ctypes.CDLL(str(compiled()))
    from fake_cuda.device import install

    install()
