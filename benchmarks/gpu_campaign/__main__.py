"""What only a GPU can tell, in at most eight minutes: does it run, is it right, does the host wait, is it fast.

    make gpu-campaign                                    on a machine with a GPU; a network is not needed
    python -m benchmarks.gpu_campaign --dry              the same parts on the fake device of tests/fake_cuda
    python -m benchmarks.gpu_campaign --parts here device

Each part is a process with a limit of its own, so that one that hangs costs only itself. The order is by what is
learned in a second. Everything that a part prints is in the log; the summary has a line for each part.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DEMO = ("distill_runner", "experiment=demo_methods", "hydra.mode=RUN", "method=nkd", "optim.epochs=1")
SHORT = ("optim.max_steps=2", "teacher.optim.epochs=1", "stages.pretrain.optim.max_steps=2")
ON_FAKE = """\
import runpy, sys
from fake_cuda import load
load()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)"""
"""Runs a module on the fake device, which must be there before the first import of torch."""


@dataclass(frozen=True)
class Part:
    """A module with its arguments.

    Attributes:
        seconds: limit on a GPU.
        dry: arguments to add on the fake device, which is slow; None if the part says nothing there.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...] | None = ()


def of_tests(file: str, *choice: str) -> tuple[str, ...]:
    return ("pytest", "-q", "--no-header", "-p", "no:cacheprovider", f"tests/cuda/{file}.py", *choice)


PARTS = (
    Part("here", 40, ("benchmarks.gpu_campaign.here",)),
    Part("device", 60, (*DEMO, *SHORT, "runtime.device=cuda")),
    Part("run", 75, (*DEMO, "teacher.optim.epochs=1", "runtime.precision=bf16"), dry=SHORT),
    Part("attention", 60, of_tests("test_attention")),
    Part("losses", 90, of_tests("test_updates", "-k", "ahead or losses or number"), dry=("-k", "number")),
    Part(
        "methods", 110, of_tests("test_updates", "-k", "every_method or sgd"), dry=("-k", "every_method and nkd-bf16")
    ),
    Part(
        "graphs",
        90,
        of_tests("test_graphs", "-k", "taken_up or replay or step or (bf16 and (alp or kd or minilmv2 or prokd))"),
        dry=("-k", "replay or step"),
    ),
    Part("waits", 60, ("benchmarks.gpu_campaign.waits",), dry=("--updates", "4", "--width", "64")),
    Part("speed", 120, ("benchmarks.gpu", "--task", "rte", "--layers", "4", "--steps", "30"), dry=None),
)
"""Parts in order. On two GPUs or more, ``torchrun -m distill_runner`` is worth a look as well."""


def run(part: Part, seconds: float, dry: bool) -> tuple[int | str, str]:
    """Run a part, and return its exit code, or ``too long``, with what it printed."""
    module, *arguments = (*part.command, *(part.dry or ())) if dry else part.command
    prefix = ["-c", ON_FAKE] if dry else ["-m"]
    folders = [str(folder) for folder in (TESTS, ROOT / "src", ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    try:
        ended = subprocess.run(
            [sys.executable, *prefix, module, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return "too long", output.decode(errors="replace") if isinstance(output, bytes) else output
    return ended.returncode, ended.stdout


def campaign(names: Sequence[str], seconds: float, dry: bool, log: Path) -> bool:
    """Run parts, print a line for each, and return whether all have succeeded."""
    start, succeeded = time.monotonic(), True
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    for part in (part for part in PARTS if part.name in names):
        remaining = seconds - (time.monotonic() - start)
        if dry and part.dry is None:
            print(f"{part.name:10} left out: it says nothing on the fake device", flush=True)
            continue
        if remaining < 15:
            print(f"{part.name:10} left out: no time", flush=True)
            succeeded = False
            continue
        begin = time.monotonic()
        code, output = run(part, remaining if dry else min(part.seconds, remaining), dry)
        succeeded &= code == 0
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {part.name}: {code}\n{output}\n")
        lines = output.strip().splitlines()
        print(
            f"{part.name:10} {code!s:8} {time.monotonic() - begin:4.0f} s  {lines[-1][:100] if lines else ''}",
            flush=True,
        )
    print(f"log: {log}")
    return succeeded


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=480, help="limit of the campaign (default: 480)")
    parser.add_argument("--dry", action="store_true", help="on the fake device, which runs on a CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu-campaign.log"), help="log")
    options = parser.parse_args()
    sys.exit(not campaign(options.parts, options.seconds, options.dry, options.out))


if __name__ == "__main__":
    main()
