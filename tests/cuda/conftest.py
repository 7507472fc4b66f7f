"""These tests run on a GPU, or on a fake one: ``tests/test_fake_cuda.py`` starts them there."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU is visible to torch; tests/test_fake_cuda.py runs these on a fake one")
