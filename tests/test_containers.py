"""The container image and the manifests: what they copy exists, and what they run is a sweep of this tool."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill_runner.commands.parser import parser_of, subcommand_of
from distill_runner.sweeping.points import Grid, GridPoint, SweepConfig
from helpers.command import distill_run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "clusters"
KUBERNETES = [*yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())]
SKYPILOT = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())


def filled(command: str, values: Mapping[str, Any]) -> list[str]:
    """The words of a command, with its variables replaced as a shell and Kubernetes do."""
    return shlex.split(re.sub(r"\$\(?([A-Z_]+)\)?", lambda match: str(values[match[1]]), command))


def kubernetes_commands(index: int) -> list[list[str]]:
    """The arguments of each Job's containers, for one index of an indexed Job."""
    return [
        filled(shlex.join(container["args"]).replace("'", ""), {"JOB_COMPLETION_INDEX": index})
        for job in KUBERNETES
        if job["kind"] == "Job"
        for container in job["spec"]["template"]["spec"]["containers"]
    ]


def skypilot_command(rank: int) -> list[str]:
    (line,) = [line for line in SKYPILOT["run"].splitlines() if line.startswith("distill-run ")]
    values = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_NODES": SKYPILOT["num_nodes"]}
    return filled(line.removeprefix("distill-run "), values)


def grid(size: int) -> Grid:
    points = [GridPoint((f"seed={seed}",), ROOT, str(seed), {}) for seed in range(size)]
    return Grid(lambda overrides: points[0], points)


@pytest.mark.parametrize("size", [4, 12, 13])
def test_the_shards_of_the_manifests_are_the_sweep(size: int) -> None:
    _, job, table = KUBERNETES
    count = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    for commands in (
        [kubernetes_commands(index)[0] for index in range(count)],
        [skypilot_command(rank) for rank in range(SKYPILOT["num_nodes"])],
    ):
        shards = [dict(word.split("=", 1) for word in command) for command in commands]
        assert {shard["sweep"] for shard in shards} == {"demo/grid"}
        parts = [SweepConfig(shard=shard["sweep.shard"]).shard_of(grid(size)).points for shard in shards]
        keys = [int(point.key) for part in parts for point in part]
        assert sorted(keys) == [*range(size)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert table["spec"]["suspend"]  # it would print a table without points


@pytest.mark.slow
def test_the_commands_of_the_manifests_are_valid(tmp_path: Path) -> None:
    """Those of the last shard are planned; subcommands are parsed."""
    points, table = kubernetes_commands(KUBERNETES[1]["spec"]["completions"] - 1)
    name = subcommand_of(table)
    assert name is not None
    parser_of(name).parse_args(table[1:])
    assert points == skypilot_command(SKYPILOT["num_nodes"] - 1)
    planned = distill_run(tmp_path, *points, "plan=true")
    assert planned.code == 0, planned.err
    assert planned.out.startswith("3 points\n")
    assert planned.out.count("  not run  ") == 3


def test_volumes_and_users_of_the_manifest_are_those_of_the_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    workdir = re.search(r"^WORKDIR (\S+)", dockerfile, re.MULTILINE)
    user = re.search(r"--uid (\d+)", dockerfile)
    assert workdir
    assert user
    claim, *jobs = KUBERNETES
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user[1])
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert [container["volumeMounts"] for container in pod["containers"]] == [
            [{"name": volume["name"], "mountPath": workdir[1]}]
        ]


def test_the_image_copies_what_the_context_has() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (copied,) = re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{file}" for file in copied.split()} == {*ignored} - {"*"}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^dist: .*\n(\t.*\n)*\t.* -m build .*--outdir dist$", makefile, re.MULTILINE)
    assert (ROOT / "constraints.txt").read_text().count("\ntorch==") == 1
    scripts = (ROOT / "pyproject.toml").read_text()
    assert 'ENTRYPOINT ["distill-run"]' in dockerfile
    assert '\ndistill-run = "distill_runner.cli:main"' in scripts
    extras = re.findall(r"EXTRAS=(\S+)", dockerfile)[0].split(",")
    assert all(f"\n{extra} = [" in scripts for extra in extras)


@pytest.mark.slow
def test_a_shard_trains_its_points_and_the_sweep_the_others(
    tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    arguments = [
        *("-m", "task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]"),
        *("teacher=base", f"teacher.source={tiny_bert_folder}", "student.num_layers=2", "method=nkd", "seed=1,2,3"),
        *("task.max_length=48", "optim.max_steps=1", "runtime.device=cpu"),
    ]

    def states() -> list[str]:
        return [yaml.safe_load(file.read_text())["status"] for file in tmp_path.glob("outputs/runs/*/status.json")]

    assert distill_run(tmp_path, *arguments, "sweep.shard=0/2").code == 0
    assert states() == ["done"] * 2
    ended = distill_run(tmp_path, *arguments)
    assert ended.code == 0, ended.err
    assert ended.err.startswith("3 points (2 done)\n")
    assert states() == ["done"] * 3
