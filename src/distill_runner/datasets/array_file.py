"""Arrays that are appended to a file piece by piece, so that they may be larger than the memory."""

from pathlib import Path
from typing import Any

import numpy as np


class ArrayFile:
    """One-dimensional array that grows on disk and is a valid ``.npy`` file once it is closed."""

    def __init__(self, file: Path, dtype: type) -> None:
        self.stream, self.dtype, self.size = file.open("wb"), np.dtype(dtype), 0
        self._write_header()

    def append(self, values: Any) -> None:
        array = np.asarray(values, dtype=self.dtype)
        self.stream.write(array.tobytes())
        self.size += len(array)

    def _write_header(self) -> None:
        """Write the header for the current size.

        numpy pads the header for the largest size, so that a later header fits over an earlier one.
        """
        description = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self.stream, description)

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stream.seek(0)
        self._write_header()
        self.stream.close()
