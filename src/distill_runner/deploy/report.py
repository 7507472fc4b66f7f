"""Report on deployed models: a table with score, size, latency and throughput of the teacher and the student."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distill_runner.deploy.measure import BATCH, PERCENTILES, RunningCost

HEADING = "## Deployment"


@dataclass(frozen=True)
class ModelForm:
    """Score, size and running cost of one model in one form.

    Attributes:
        model: ``student`` or ``teacher``.
        form: ``torch``, ``ONNX``, ``ONNX int8`` or ``OpenVINO``.
        score: the task's first metric on the first validation split.
        num_bytes: size of the files, or of the parameters for torch.
        cost: latency and throughput.
        difference: largest absolute difference between the outputs of this form and of torch; None for torch itself.
        agreement: fraction of the examples with the same prediction as torch; None for torch itself.
    """

    model: str
    form: str
    score: float
    num_bytes: int
    cost: RunningCost
    difference: float | None = None
    agreement: float | None = None


def table(rows: Sequence[ModelForm], metric: str) -> str:
    """Return a Markdown table with one line per row."""
    head = ["model", "form", f"{metric} ×100", "MB", *(f"p{p} ms" for p in PERCENTILES), f"examples/s at {BATCH}"]
    head += ["largest difference", "same prediction"]
    lines = [f"| {' | '.join(head)} |", f"| --- | --- |{' ---: |' * (len(head) - 2)}"]
    for row in rows:
        cells = [row.model, row.form, f"{100 * row.score:.2f}", f"{row.num_bytes / 1e6:.1f}"]
        cells += [f"{row.cost.milliseconds[p]:.2f}" for p in PERCENTILES]
        cells += [f"{row.cost.examples_per_second:.1f}"]
        cells += ["" if row.difference is None else f"{row.difference:.1e}"]
        cells += ["" if row.agreement is None else f"{100 * row.agreement:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(rows: Sequence[ModelForm], metric: str, conditions: str, loading: str) -> str:
    """Return the section on deployment for a model card, as Markdown; ``loading`` is a code block."""
    return f"{HEADING}\n\n{table(rows, metric)}\n\n{conditions}\n\n{loading}\n"


def as_json(rows: Sequence[ModelForm], conditions: str) -> dict[str, Any]:
    return {"conditions": conditions, "rows": [asdict(row) for row in rows]}


def put_into(card: str, written: str) -> str:
    """Return ``card`` with the section ``written``, in the place of an earlier section on deployment or at the end.

    The earlier section ends with its code block (``section``). Text after that block stays.
    """
    before, _, earlier = card.partition(f"\n{HEADING}\n")
    return before.rstrip("\n") + f"\n\n{written}" + earlier.partition("\n```\n")[2]
