"""``distill-run-export``: write a finished run's student as ONNX, check it against torch, and measure its speed."""

import json
import platform
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_runner.commands.arguments import Parser, ended
from distill_runner.common.errors import Unavailable, UserError
from distill_runner.common.schema import LARGEST
from distill_runner.deploy import openvino
from distill_runner.deploy.measure import Engine, PaddedTexts, running_costs
from distill_runner.deploy.onnx import FOLDER, PLAIN, OnnxEngine, TorchEngine, export, quantise, require_onnx
from distill_runner.deploy.report import ModelForm, as_json, put_into, section, table
from distill_runner.deploy.student import Student
from distill_runner.report.model_card import licensed
from distill_runner.training.config import MANY_THREADS

if TYPE_CHECKING:
    from distill_runner.kinds import Task

EXACT, TOLERANCE = ("ONNX", "OpenVINO"), 1e-3
"""Forms in float32, and the largest allowed difference to torch's outputs, relative to max(1, largest output)."""
LOADING = """```python
from optimum.onnxruntime import ORTModelForSequenceClassification

model = ORTModelForSequenceClassification.from_pretrained("{folder}", subfolder="onnx", file_name="{file}")
```"""
EXAMPLES = """examples:
  distill-run-export outputs/runs/sst2-alp-0123456789ab
  distill-run-export outputs/runs/sst2-alp-0123456789ab --threads 4 --examples 500 --push me/my-student
"""


def main() -> None:
    """Entry point of ``distill-run-export``."""
    ended(lambda: export_run(sys.argv[1:]))


def export_run(arguments: list[str]) -> None:
    """Write ``onnx/`` into the folder of the student's model and compare what its forms cost to run.

    The table is written to ``deploy.json`` and to the model card, and printed.

    Raises:
        UserError: the folder has no student, a package is missing, or ONNX gives other outputs than torch.
    """
    given = _parser().parse_args(arguments)
    for option, count, most in (("--threads", given.threads, MANY_THREADS), ("--examples", given.examples, LARGEST)):
        if not 1 <= count <= most:
            raise UserError(option, count, f"must be between 1 and {most}")
    require_onnx()
    if given.openvino:
        openvino.require_openvino()
    student = Student.read(given.run)
    _quiet(given.threads)
    split = next(iter(student.task.validation.values()))
    judge = _Judge(student.task, split, str(student.model), given.threads)
    chosen = (given.int8, given.openvino)
    forms = judge.forms("student", student.model, student.model, *chosen)
    engines = {("student", form): engine for form, engine in forms.items()}
    with TemporaryDirectory() as folder:
        teacher = None if given.no_teacher else _teacher(given.run)
        if teacher is not None:
            forms = judge.forms("teacher", teacher, Path(folder), *chosen)
            engines = {("teacher", form): engine for form, engine in forms.items()} | engines
        rows = judge.rows(engines, given.examples)
    conditions = (
        f"{platform.processor() or platform.machine()}, {given.threads} thread(s), one example at a time "
        f"(p50, p95, p99) and {min(given.examples, len(judge.examples))} examples in batches, of the validation set; "
        "the forms take turns; tokenizing is not counted."
    )
    metric = student.task.metrics[0]
    (given.run / "deploy.json").write_text(json.dumps(as_json(rows, conditions), indent=1))
    card = student.model / "README.md"
    loading = LOADING.format(folder="this folder", file=PLAIN)
    before = card.read_text() if card.is_file() else ""
    if given.license:
        before = licensed(before, given.license)
    written = put_into(before, section(rows, metric, conditions, loading))
    card.unlink(missing_ok=True)  # the file may be a hard link to a file in the store
    card.write_text(written)
    print(table(rows, metric), conditions, f"written: {student.model / FOLDER}", sep="\n")
    if given.push:
        print(_push(student.model, given.push))


def _parser() -> Parser:
    parser = Parser("distill-run-export", formatter_class=RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.description = (
        "Export a finished run's student to ONNX in float32 and 8 bits, and measure what each form costs to run."
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch and of ONNX Runtime (default: 1)")
    parser.add_argument("--examples", type=int, default=200, help="number of examples that are timed (default: 200)")
    parser.add_argument("--no-int8", dest="int8", action="store_false", help="write float32 only, not 8 bits")
    parser.add_argument("--openvino", action="store_true", help="write OpenVINO files too, in float32")
    parser.add_argument("--no-teacher", action="store_true", help="measure the student only")
    parser.add_argument("--license", metavar="ID", help="licence in the model card, by its name on the hub: apache-2.0")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the model's folder to the Hugging Face hub")
    return parser


def _quiet(threads: int) -> None:
    import torch

    from distill_runner.common.terminal import quiet

    quiet()
    torch.set_num_threads(threads)


class _Judge:
    """Measures each model on the validation split: its outputs, their score, and its running time.

    Attributes:
        texts: the examples as encoded by each model's own tokenizer, by the name of the model.
    """

    def __init__(self, task: "Task", split: str, source: str, threads: int) -> None:
        if not task.num_positions or task.has_ids:
            remedy = "Only texts with classes or scores can."
            raise UserError("folder", source, f"task.kind={task.kind} cannot be exported", remedy)
        self.task, self.threads, self.examples = task, threads, task.examples(split)
        self.texts: dict[str, PaddedTexts] = {}

    def forms(self, name: str, model: Path, place: Path, int8: bool, for_openvino: bool) -> dict[str, Any]:
        """Return engines of the model by form: in torch, and for files that are written into folders of ``place``."""
        from distill_runner.models.build import build
        from distill_runner.models.config import ModelConfig
        from distill_runner.models.sources import read_tokenizer

        texts = PaddedTexts(read_tokenizer(str(model)), self.examples.texts, self.task.num_positions)
        self.texts[name] = texts
        built = build(ModelConfig(source=str(model), head="keep"), self.task.head)
        path = export(built, texts.inputs(texts.spread()), place / FOLDER / PLAIN)
        forms = {"torch": TorchEngine(built), "ONNX": OnnxEngine(path, self.threads)}
        if int8:
            forms["ONNX int8"] = OnnxEngine(quantise(path), self.threads)
        if for_openvino:
            converted = openvino.convert(path, place / openvino.FOLDER / openvino.PLAIN)
            forms["OpenVINO"] = openvino.OpenVinoEngine(converted, self.threads)
        return forms

    def rows(self, engines: Mapping[tuple[str, str], Any], num_examples: int) -> list[ModelForm]:
        """Return a row for each engine: size, score, running cost and difference to torch.

        Args:
            engines: engines by model and form.
            num_examples: number of examples that are timed.
        Raises:
            UserError: a form in float32 gives other outputs than torch.
        """
        outputs = {key: self.texts[key[0]].outputs(engine) for key, engine in engines.items()}
        named: dict[str, Engine] = {" ".join(key): engine for key, engine in engines.items()}
        texts = {" ".join(key): self.texts[key[0]] for key in engines}
        measured, rows = running_costs(named, texts, num_examples), []
        for (model, form), found in outputs.items():
            reference = outputs[model, "torch"]
            difference = float(np.abs(found - reference).max())
            if form in EXACT and difference > TOLERANCE * max(1.0, float(np.abs(reference).max())):
                problem = f"{form} of its {model} gives outputs that differ from torch's by up to {difference:.1e}"
                raise UserError("distill-run-export", None, problem, "Do not deploy it; please report this.")
            same = [a == b for a, b in zip(self.task.as_lines(found), self.task.as_lines(reference), strict=True)]
            compared = (None, None) if form == "torch" else (difference, float(np.mean(same)))
            cost, engine = measured[f"{model} {form}"], engines[model, form]
            rows.append(ModelForm(model, form, self._score(found), engine.num_bytes, cost, *compared))
        return rows

    def _score(self, outputs: np.ndarray) -> float:
        with TemporaryDirectory() as folder:
            self.task.write(Path(folder), self.examples, next(iter(self.texts.values())).tokenizer)
            return self.task.score(outputs, self.task.open(Path(folder)))[self.task.metrics[0]]


def _teacher(run: Path) -> Path | None:
    """Return the folder of the teacher's model; None if the model is not available."""
    from distill_runner.analysis.finished import FinishedRun

    try:
        finished = FinishedRun.read(run)
        if finished.teacher.config.given is not None:
            return None  # known only by its predictions
        return finished.pipeline.build(finished.teacher) / "model"
    except UserError as error:
        print(f"without the teacher: {error}", file=sys.stderr)
        return None


def _push(folder: Path, name: str) -> str:
    """Upload the folder as a model to the hub, and return a line with its address.

    Raises:
        Unavailable: the hub cannot be reached.
        UserError: the hub refuses it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="A distilled student")
    except httpx.TransportError as error:
        remedy = f"Everything is written to {folder}. Check the network, then: hf upload {name} {folder}"
        raise Unavailable("--push", name, f"the hub cannot be reached ({error})", remedy) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = f"cannot be uploaded: {str(error).splitlines()[0]}"
        raise UserError("--push", name, problem, "Log in first (hf auth login), or set HF_TOKEN.") from error
    return f"uploaded: {commit.commit_url if hasattr(commit, 'commit_url') else name}"
