"""Processes of one run that ``torchrun`` or ``srun`` starts, on any number of machines, as their environment says."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat

from distill_runner.common.errors import UserError

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Ports of the store that the tasks of a Slurm step share; the step decides, so that steps on one machine differ."""
LAST_PORT = 65_535


@dataclass(frozen=True)
class Launch:
    """One of the processes that a launcher has started together; the process of rank 0 runs the command.

    Attributes:
        local_rank, local_size: number of this process on its machine, and how many the machine has.
        address: host and port of the store where all processes meet; None leaves it to torch (``env://``).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: tuple[str, int] | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch | None":
        """Return what ``torchrun`` or ``srun`` has set; None if this process was started alone.

        Raises:
            UserError: a variable is missing, or has a value that no launcher sets.
        """
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            rank, size, local_rank, local_size = (_number(environment, name) for name in names)
            launch = cls(rank, size, local_rank, local_size)
        elif "SLURM_STEP_NUM_TASKS" in environment:
            launch = _slurm_task(environment)
        else:
            return None
        return launch if launch.size > 1 else None


def _slurm_task(environment: Mapping[str, str]) -> Launch:
    """Return what ``srun`` has set in one of its tasks; ``MASTER_ADDR`` and ``MASTER_PORT`` replace what it implies."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, size, local_rank, node, job, step = (_number(environment, name) for name in names)
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_size = tasks[node] if node < len(tasks) else 1
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    port = FIRST_PORT + (7 * job + step) % NUM_PORTS
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT")
        if not 1 <= port <= LAST_PORT:
            raise UserError("MASTER_PORT", port, f"must be between 1 and {LAST_PORT}", "Leave it out.")
    return Launch(rank, size, local_rank, local_size, (host, port))


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from Slurm's notation, such as ``2(x3),1``."""
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(chain.from_iterable(repeat(int(count), int(times or 1)) for count, times in entries))


def first_host(node_list: str) -> str:
    """Return the first host of a list in Slurm's notation, such as ``gpu[003-005,9],other``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^,]*))?", node_list)
    return "".join(part or "" for part in match.groups()) if match else "localhost"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
        problem = "is not a number that torchrun or srun sets" if value else "is not set, but others of its kind are"
        raise UserError(name, value or None, problem, "Start all processes with torchrun or srun.")
    return int(value)
