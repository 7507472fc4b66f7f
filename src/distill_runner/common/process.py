"""All state that this program sets for its whole process.

It comprises environment variables, signal handlers, the garbage collector, and switches of libraries. Other modules
call the functions below and never set such state themselves, which a test checks. ``docs/architecture.md`` lists every
switch with the reason for it. Libraries are imported inside the functions, so that ``--help`` stays fast.
"""

import codecs
import csv
import ctypes
import errno
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

REQUEST_SECONDS = 10.0
"""Time limit for a request to the hub that sets no limit itself."""
POLL_SECONDS = 1.0
SECONDS_TO_SAVE = 20.0
"""Seconds from SIGTERM, which lets training stop and save, to the end of the process."""
RECOMPILE_LIMIT = 64
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Constants from glibc's malloc.h."""

# Environment variables


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context, for this process and the processes that it starts."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def make_matrix_products_reproducible() -> None:
    """Let MKL add up each matrix product in one fixed order (``MKL_CBWR``).

    With AVX-512, MKL divides long sums among its threads if matrices are small. Outputs would then depend on the number
    of threads and on the number of texts in a batch. MKL reads the variable at its first matrix product.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def limit_spinning() -> None:
    """Let idle threads of OpenMP sleep after some microseconds of spinning (``GOMP_SPINCOUNT``).

    By default libgomp's threads spin for long while they wait, and take the CPU from the thread they wait for if other
    processes run. On a busy machine an update then takes 2 to 3 times as long (docs/notebook.md). libgomp reads the
    variable when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # the user's own choice
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def audit_events(hook: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call ``hook`` with name and arguments of each audit event, such as ``open``, until the process ends."""
    sys.addaudithook(hook)


def disable_ray_statistics() -> None:
    """Keep a Ray cluster that this process starts from sending usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def enter_job(folder: str, environment: Mapping[str, str]) -> None:
    """Give a Ray worker the working folder and the environment variables of the sweep that it works for."""
    os.chdir(folder)
    os.environ.update(environment)


def import_from_working_folder() -> None:
    """Let modules in the working folder be imported, as ``python -m`` does; a console script leaves the folder out."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


# Garbage collection and memory


@contextmanager
def fast_imports() -> Iterator[None]:
    """Turn garbage collection off during imports, and exclude imported objects from all later collections.

    Imported objects are never garbage, and searching them costs time during the imports, later and at exit. torch and
    transformers load in three quarters of the usual time.
    """
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # else nothing was imported, and existing objects may be garbage
            gc.freeze()
        gc.enable()


@contextmanager
def manual_garbage_collection() -> Iterator[Callable[[], None]]:
    """Turn automatic garbage collection off, and yield a function that searches the objects made since its last call.

    An automatic full collection searches all objects, so the time for a long list of objects would grow quadratically.
    """

    def collect() -> None:
        gc.collect()
        gc.freeze()

    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def computation_mode() -> Iterator[None]:
    """Flush denormal numbers to zero within the context, and let the process keep freed memory from now on.

    At the end, torch has as many threads as before.

    AdamW's averages of gradients decay into denormals if a word has not occurred for some 750 updates, and stay there.
    Some CPUs compute many times slower with denormals (docs/notebook.md). Threads started later flush them as well.
    """
    import torch

    _keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the process; other C libraries stay as they are.

    By default, glibc returns blocks of more than 32 MiB to the system at once, such as the gradient of a vocabulary at
    each update. Their pages then come back one by one, filled with zeros.
    """
    with suppress(AttributeError, TypeError):  # raised for other C libraries and on Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


# Standard output and error


def protect_output() -> None:
    """Let the process go on when its output cannot be written, such as to ``| head``, whose pipe closes early.

    Python would raise an error from ``print``, or while it flushes at exit, and a finished run would count as failed.
    ``output_error`` returns what went wrong. Characters that the output cannot hold are written as their numbers.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw: Any = _ProtectedOutput(stream.fileno(), "w", closefd=False)
            protected = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw),
                _output_encoding(stream),
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, protected)


def _output_encoding(stream: io.TextIOWrapper) -> str:
    """Return the encoding of a terminal, and UTF-8 for files, pipes and the C locale, whose ASCII nobody means."""
    if "PYTHONIOENCODING" in os.environ or (stream.isatty() and codecs.lookup(stream.encoding).name != "ascii"):
        return stream.encoding
    return "utf-8"


class _ProtectedOutput(io.FileIO):
    """Standard output or error. After an error, all that is written to it is dropped."""

    error: str | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal was closed
                type(self).error = error.strerror
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def output_error() -> str | None:
    """Return why output is incomplete, such as a full disk; None if it is complete or nobody reads it any more."""
    with suppress(AttributeError, ValueError):  # raised if the stream is None, or closed
        sys.stdout.flush()
    return _ProtectedOutput.error


@contextmanager
def suppressed_output() -> Iterator[None]:
    """Suppress prints, logs and warnings within the context, such as those of an exporter that reports each step."""
    threshold = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(threshold)


# Files


def allow_long_csv_fields() -> None:
    """Let Python's ``csv`` read values of any length, such as whole documents; its own limit is 131,072 characters."""
    csv.field_size_limit(2**31 - 1)


# torch


def limit_threads(threads: int) -> None:
    """Set the number of CPU threads of torch. ``computation_mode`` restores the number at its end."""
    import torch

    torch.set_num_threads(threads)


@contextmanager
def pinned_cpus(count: int) -> Iterator[list[int]]:
    """Pin this thread, and threads that it starts, to ``count`` CPUs within the context.

    Yields:
        The CPUs; none where the system cannot pin threads, as on macOS.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield []
        return
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed)[-count:]
    os.sched_setaffinity(0, cpus)
    try:
        yield cpus
    finally:
        os.sched_setaffinity(0, allowed)


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


def raise_recompile_limit() -> None:
    """Let ``torch.compile`` make ``RECOMPILE_LIMIT`` graphs of a function: for all widths, in training and evaluation.

    Beyond torch's limit of 8, a function would silently run without compilation.
    """
    import torch

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


# Processes


def use_forkserver(preload: str, default: bool = False) -> Any:
    """Return the ``forkserver`` context of ``multiprocessing``, whose server imports the module ``preload`` once.

    A process forked from this server starts without the threads of torch, which would not survive a plain fork.

    Args:
        default: whether to make this start method the default. joblib sets a default that a child does not know.
    """
    if default:
        multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def end_with_parent(grace: float | None = None) -> None:
    """Start a thread that ends this process soon after the parent process has ended, however the parent ended.

    Nobody waits for the work of such a process any more.

    Args:
        grace: seconds from the parent's end to SIGTERM, which asks this process to save and to end. None ends this
            process at once.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        try:
            parent.join()  # type: ignore[union-attr]
        except (AttributeError, ValueError):  # a launcher's own type of process, whose parent cannot be joined
            while os.getppid() == number:
                time.sleep(POLL_SECONDS)
        if grace is not None:
            time.sleep(grace)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SECONDS_TO_SAVE)
        os._exit(1)  # sys.exit would end this thread only

    threading.Thread(target=watch, daemon=True).start()


def end_process(code: int) -> None:
    """End this process at once, from any thread; nothing waits for a library that is stuck in a call."""
    sys.stderr.flush()
    os._exit(code)


# Signals


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, which batch systems send, act like Ctrl-C within the context."""
    with suppress(ValueError):  # not in the main thread, whose owner handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that training stops between two steps; a second signal stops at once."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # outside the main thread, handlers cannot be set; the program that owns it handles signals
        previous = {}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches all processes of a training run. Before training, only the main process reacts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# Messages and requests of libraries


def quiet_transformers() -> None:
    """Silence the progress bars of ``transformers`` and its messages below errors; this program reports instead."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork would otherwise print a warning
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # the conversion may open a pull request on the hub
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


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


def configure_hub_client() -> None:
    """Give each request to the hub a time limit, and silence ``huggingface_hub``; ``common/hub.py`` reports instead.

    The library lists the files of a repository without a time limit, so a hub that stops answering would block a run
    forever.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils._http import default_client_factory

    def limit_time(request: Any) -> None:
        limits = request.extensions.setdefault("timeout", {})
        for name in ("connect", "read", "write", "pool"):
            limits[name] = limits.get(name) or REQUEST_SECONDS

    def limited_client() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(limit_time)
        return client

    set_client_factory(limited_client)
    hub_logging.set_verbosity(logging.CRITICAL)
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def disable_mlflow_telemetry() -> None:
    """Keep MLflow, which reads the variable at its import, from sending usage statistics."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def quiet_wandb_telemetry() -> None:
    """Silence the telemetry of W&B, which logs errors while offline."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def quiet_launcher_warning() -> None:
    """Silence Hydra's warning about a launcher's configuration that is checked by the schema of the plugin's name.

    ``conf/hydra/launcher/submitit_slurm.yaml`` has the plugin's name on purpose, so that the plugin's schema checks it.
    """
    warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")
