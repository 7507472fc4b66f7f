"""Switches of libraries that act on the whole process: torch, transformers, datasets, the hub's client, trackers.

Other modules call the functions below and never set such switches themselves, which a test checks.
``docs/architecture.md`` lists them with their reasons. Libraries are imported inside the functions, so that ``--help``
stays fast. ``process`` has the state of the process itself.
"""

import csv
import ctypes
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from distill_runner.common.process import available_cpus, num_launched

REQUEST_SECONDS = 10.0
"""Time limit for a request to the hub that sets no limit itself."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Constants from glibc's malloc.h."""

# At the import of this package


def set_early_switches() -> None:
    """Set what libraries read once: when they are imported, or at their first matrix product. The user's own stays."""
    # With AVX-512, MKL divides long sums among its threads if matrices are small, and outputs would depend on the
    # number of threads and of the texts in a batch.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # By default, idle threads of OpenMP spin for long, and take the CPU from the thread they wait for if other
    # processes run. On a busy machine an update then takes 2 to 3 times as long (docs/notebook.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # transformers reads weights in the main thread, which takes no longer. Ctrl-C while its pool starts a thread leaves
    # one that waits for work, and Python waits for it at its end.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    # Hydra warns of conf/hydra/launcher/submitit_slurm.yaml, which has the plugin's name so that its schema checks it.
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


# Threads of torch


@contextmanager
def computation_mode() -> Iterator[None]:
    """Flush denormal numbers to zero within the context, and let the process keep freed memory from now on.

    At the end, torch has as many threads as before.

    AdamW's averages of gradients decay into denormals if a word has not occurred for some 750 updates, and stay there.
    Some CPUs compute many times slower with denormals (docs/notebook.md). Threads started later flush them as well.

    By default, glibc returns blocks of more than 32 MiB to the system at once, such as the gradient of a vocabulary at
    each update. Their pages then come back one by one, filled with zeros.
    """
    import torch

    with suppress(AttributeError, TypeError):  # raised for other C libraries than glibc and on Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def limit_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch; None takes the process's part of the CPUs.

    torch's own default ignores the quota of a container, in which more threads wait for each other.
    ``computation_mode`` restores the number at its end.
    """
    import torch

    if threads is None:
        threads = max(1, min(torch.get_num_threads(), available_cpus()) // num_launched("LOCAL_WORLD_SIZE"))
    torch.set_num_threads(threads)


def allow_tf32(allowed: bool) -> None:
    """Let float32 matrix products and convolutions on GPUs round their factors to TF32, or forbid it.

    Convolutions have a switch of their own, which torch turns on by default. Since 2.9 torch warns of these switches;
    with the new ones, whoever reads the old ones gets an error, such as ``torch.compile``.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(TF32|fp32_precision)")
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


# Readers


def allow_long_csv_fields() -> None:
    """Let Python's ``csv`` read values of any length, such as whole documents; its own limit is 131,072 characters."""
    csv.field_size_limit(2**31 - 1)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence progress bars and log lines of ``datasets`` on standard error; the callers report its errors."""
    import datasets
    from huggingface_hub import utils as hub

    with ExitStack() as restore:
        for library in (datasets.utils, hub):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                restore.callback(library.enable_progress_bars)
        restore.callback(datasets.utils.logging.set_verbosity, datasets.utils.logging.get_verbosity())
        datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
        yield


@contextmanager
def offline_datasets() -> Iterator[None]:
    """Keep ``datasets`` from any request to the hub within the context.

    ``load_dataset`` asks the hub even for local files, to count the uses of a format, and waits for the answer.
    """
    import datasets

    previous = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = previous


# Models and the hub


def quiet_transformers() -> None:
    """Silence the progress bars of ``transformers`` and its messages below errors; this program reports instead."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork would otherwise print a warning
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # the conversion may open a pull request on the hub
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def configure_hub_client() -> None:
    """Give each request to the hub a time limit, and silence ``huggingface_hub``; ``common/hub.py`` reports instead.

    The library lists the files of a repository without a time limit, so a hub that stops answering would block a run
    forever.
    """
    from huggingface_hub import get_session, set_client_factory
    from huggingface_hub.utils import logging as hub_logging

    def limit_time(request: Any) -> None:
        limits = request.extensions.setdefault("timeout", {})
        for name in ("connect", "read", "write", "pool"):
            limits[name] = limits.get(name) or REQUEST_SECONDS

    own = get_session()
    hooks = {"request": [*own.event_hooks["request"], limit_time]}
    client = partial(type(own), follow_redirects=own.follow_redirects, timeout=own.timeout)
    set_client_factory(lambda: client(event_hooks=hooks))
    hub_logging.set_verbosity(logging.CRITICAL)
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
