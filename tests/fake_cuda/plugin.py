"""For ``pytest -p``: the device is there before anything imports torch."""

from fake_cuda import load

load()
