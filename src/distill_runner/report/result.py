"""The result of a run: what ``result.json`` holds, the tables read and the model card tells."""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distill_runner.config import RunConfig
from distill_runner.report.published import find
from distill_runner.stages import Stage

PACKAGES = (
    "distill-run",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "numpy",
    "hydra-core",
    "scikit-learn",
)


def finished(
    run: RunConfig, stage: Stage, artifact: Path, teacher_artifact: Path | None, folder: Path
) -> dict[str, Any]:
    """The result of a stage that is in the store.

    Args:
        stage, artifact: what the run asked for, and its folder in the store.
        teacher_artifact: of the stage's teacher, if it read one.
        folder: of the run.
    """
    measured = json.loads((artifact / "metrics.json").read_text())
    teacher = json.loads((teacher_artifact / "metrics.json").read_text()) if teacher_artifact else None
    metric = next(iter(measured["metrics"]))
    described = described_by(run)
    found = find(
        described["method"],
        described["task"],
        num_layers=stage.shape.num_layers,
        teacher=run.teacher.source,
        metric=metric,
        mapping=described["mapping"],
        attention=described["attention"],
        heads=described["heads"],
    )
    return {
        "key": stage.key,
        "status": "done",
        **described,
        "metric": metric,
        "score": measured["metrics"][metric],
        "metrics": measured["metrics"],
        "select": stage.config.select,
        "best_epoch": measured["best"],
        "epochs": measured["epoch"],
        "steps": measured["step"],
        "teacher": run.teacher.name if stage.teacher else None,
        "teacher_score": teacher["metrics"][metric] if teacher else None,
        "student": measured["shape"] | {"init": _init(run, stage)},
        "num_params": measured["num_params"],
        "examples_per_second": measured["examples_per_second"],
        "seconds": measured["wall_seconds"],
        "published": found.model_dump() if found else None,
        "readings": list(_readings(stage)),
        "folder": str(folder),
        "model": str(folder / "model"),
    }


def described_by(run: RunConfig) -> dict[str, Any]:
    """What is known of a run before it starts: its names, whatever becomes of it."""
    student = run.stages["student"]
    data = student.task or student.corpus
    assert data is not None
    terms = [term for name, term in student.method["terms"].items() if student.method["weights"][name]]
    mapping = next((term["mapping"] for term in terms if "mapping" in term), None)
    attention = next((term["attention"] for term in terms if "attention" in term), None)
    rule = mapping and (f"layer:{mapping['layer']}" if mapping["rule"] == "layer" else mapping["rule"])
    return {
        "task": data.name,
        "dataset": student.task.dataset if student.task else None,
        "transfer": _transfer(run),
        "method": run.method,
        "mapping": rule,
        "attention": attention and attention["kind"],
        "heads": attention and attention.get("heads"),
        "weights": student.method["weights"],
        "lr": student.optim.lr,
        "temperature": next((term["temperature"] for term in terms if "temperature" in term), None),
        "seed": run.seed,
        "command": run.command,
    }


def _transfer(run: RunConfig) -> dict[str, Any] | None:
    """Name and size of the transfer set of the stage that distils on one; the size is None where it is whole."""
    used = (stage.transfer for stage in run.stages.values() if stage.transfer)
    return next(({"name": transfer.name, "size": transfer.size} for transfer in used), None)


def _init(run: RunConfig, stage: Stage) -> str:
    source = stage.config.model.source
    if source is None:
        return "new weights"
    origin = {run.teacher.source: "pretrained", "stage:teacher": "finetuned"}.get(source or "", source)
    return f"{stage.config.model.layers} of {origin}"


def _readings(stage: Stage) -> Iterator[str]:
    """Where a paper is silent: what this run took, so that a reader of the result need not look it up."""
    optim = stage.config.optim
    yield f"optimiser {optim.name}, schedule {optim.schedule} after {optim.warmup:g} of the steps as warm-up"
    for name, term in stage.config.method["terms"].items():
        if "scale_by_t2" in term and stage.config.method["weights"][name]:
            yield f"{name} scaled by T^2: {str(term['scale_by_t2']).lower()}"
        if attention := term.get("attention"):
            yield f"attention scale {attention['scale']}, normalize {str(attention['normalize']).lower()}"
    yield (f"the teacher's seed is {stage.teacher.config.seed} for all students" if stage.teacher else "no teacher")
    yield f"the {stage.config.select} epoch by the first metric is reported"


def environment() -> dict[str, Any]:
    """Versions of Python and packages, and the commit of the checkout if there is one."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "commit": _commit(),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replace ``file`` in one step."""
    file.with_suffix(".tmp").write_text(json.dumps(content, indent=1, default=str))
    file.with_suffix(".tmp").replace(file)
