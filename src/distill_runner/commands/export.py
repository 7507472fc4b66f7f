"""``distill-run export``: write a finished run's student as ONNX, check it against torch, and measure its speed."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distill_runner.common.errors import Unavailable, UserError, first_line
from distill_runner.common.library_switches import limit_threads, quiet_transformers
from distill_runner.common.schema import LARGEST
from distill_runner.deploy.measure import BATCH, conditions, evaluate, section, table, with_section
from distill_runner.deploy.onnx import FOLDER, NOT_EXPORTED, PLAIN, require_onnx
from distill_runner.deploy.student import Student
from distill_runner.pipeline.status import write_json
from distill_runner.report.card import CARD, with_license
from distill_runner.training.config import MAX_THREADS


def export_run(options: Namespace) -> None:
    """Write ``onnx/`` into the folder of the student's model and compare what its forms cost to run.

    The table is written to ``deploy.json`` and to the model card, and printed.

    Raises:
        UserError: the folder has no student, a package is missing, or ONNX gives other outputs than torch.
    """
    limits = (("--threads", options.threads, MAX_THREADS), ("--examples", options.examples, LARGEST))
    for name, number, limit in limits:
        if not 1 <= number <= limit:
            raise UserError(name, number, f"must be between 1 and {limit}")
    require_onnx()
    student = Student.read(options.run)
    task = student.task
    if not task.exportable:
        problem = f"its student is for task.type={task.type}, which is not exported"
        raise UserError("folder", options.run, problem, NOT_EXPORTED)
    if options.public and not options.push:
        raise UserError("--public", None, "says how a student is pushed, but --push names no repository")
    if options.push:
        _create_repository(options.push, options.public)  # before the export, which takes minutes
    quiet_transformers()
    limit_threads(options.threads)
    started = time.time()
    with TemporaryDirectory() as scratch:
        teacher = _teacher(options.run) if options.teacher else None
        models = {"teacher": (teacher, Path(scratch))} if teacher else {}
        models["student"] = (student.model, student.model)
        rows = evaluate(models, task, options.threads, options.examples, options.int8)
    for file in (student.model / FOLDER).iterdir():
        if file.stat().st_mtime < started:  # of an earlier export, which had other forms or an earlier student
            file.unlink()
    circumstances = (
        f"{conditions(options.threads)}; one example at a time (p50, p95, p99) and batches of {BATCH}, of at most "
        f"{options.examples} validation examples; the forms take turns; tokenizing is not counted."
    )
    metric = task.metrics[0]
    write_json(options.run / "deploy.json", {"conditions": circumstances, "rows": [asdict(row) for row in rows]})
    file = student.model / CARD
    card = file.read_text(encoding="utf-8") if file.is_file() else ""
    if options.license:
        card = with_license(card, options.license)
    loading = task.onnx_loading.format(
        model=task.head.auto.replace("AutoModel", "ORTModel"), folder="this folder", file=PLAIN
    )
    card = with_section(card, section(rows, metric, circumstances, loading, task.agreement_name))
    file.unlink(missing_ok=True)  # the file may be a hard link to a file in the store
    file.write_text(card, encoding="utf-8")
    print(table(rows, metric, task.agreement_name), circumstances, f"written: {student.model / FOLDER}", sep="\n")
    if options.push:
        print(f"uploaded: {_push(student.model, options.push)}")


def _teacher(run: Path) -> Path | None:
    """Return the folder of the teacher's model; None if the model is not available."""
    from distill_runner.analysis.finished_run import FinishedRun

    try:
        finished = FinishedRun.read(run)
        if finished.teacher.config.prediction_source is not None:
            return None  # known only by its predictions
        return finished.pipeline.build(finished.teacher) / "model"
    except UserError as error:
        print(f"without the teacher: {error}", file=sys.stderr)
        return None


def _create_repository(name: str, public: bool) -> None:
    """Create a model's repository on the hub if there is none, private unless ``public``.

    Raises:
        Unavailable, UserError: as ``_hub``; or the repository is public, but should not be.
    """
    with _hub(name, "Check the network, or export without --push.") as hub:
        hub.create_repo(name, exist_ok=True, private=not public)
        is_public = not hub.model_info(name).private
    if is_public and not public:
        problem = "is a public repository, and a student is pushed to a private one by default"
        raise UserError("--push", name, problem, "Add --public, or name another repository.")


def _push(folder: Path, name: str) -> str:
    """Upload the folder as a model to its repository on the hub, and return the address of the commit."""
    with _hub(name, f"Everything is written to {folder}. Check the network, then: hf upload {name} {folder}") as hub:
        commit = hub.upload_folder(repo_id=name, folder_path=folder, commit_message="A distilled student")
    return str(commit.commit_url)


@contextmanager
def _hub(name: str, remedy: str) -> Iterator[Any]:
    """Yield the hub's client, and turn its errors within the context into errors for users.

    Raises:
        Unavailable: the hub cannot be reached.
        UserError: the hub refuses a request.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        yield HfApi()
    except OfflineModeIsEnabled as error:
        raise UserError("--push", name, "HF_HUB_OFFLINE is set", "Unset it, or export without --push.") from error
    except httpx.TransportError as error:
        raise Unavailable("--push", name, f"the hub cannot be reached ({error})", remedy) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = f"cannot be uploaded: {first_line(error)}"
        raise UserError("--push", name, problem, "Log in first (hf auth login), or set HF_TOKEN.") from error
