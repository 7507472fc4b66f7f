"""A folder that serves a model: ONNX files, a card with a few lines of Python, ``serve.py`` and a ``Dockerfile``.

``serve.py`` needs fastapi, onnxruntime and tokenizers, not torch.
"""

import json
import re
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from distill_runner.deploy.onnx import FOLDER, OnnxEngine
from distill_runner.report.card import CARD, with_license
from distill_runner.tasks import Task
from distill_runner.tasks.task import EMPTY, SERVICE

SERVE = "serve.py"
HEADING, END = "## Deployment", "<!-- end of deployment -->"
LARGEST = 100_000
"""Bytes of text in a request to ``serve.py``."""
FIELDS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
"""Inputs of a model, by what the library tokenizers calls them."""


def write_service(
    folder: Path, file: Path, task: Task, threads: int, paragraphs: list[str], license_name: str | None = None
) -> None:
    """Write the card's section on deployment into the folder of a model, and of one for texts a server.

    The server is ``serve.py`` with its ``Dockerfile``.

    Args:
        file: the ONNX file in the folder that is served.
        threads: number of CPU threads with which it was timed.
        paragraphs: Markdown for the section, before the code.
        license_name: of the card, by its name on the hub; None leaves it as it is.
    """
    name = file.relative_to(folder).as_posix()
    program = _program(folder, name, task, threads)
    packages, answers = "numpy onnxruntime tokenizers" if task.tokenized else "numpy onnxruntime pillow", list[str]()
    if task.tokenized:
        answers = _write_server(folder, name, program, task)
    card = folder / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    code = f"```python\n{_with_example(folder, program, task)}```"
    words = f"In this folder, with `pip install {packages}`, `{name}` answers by:"
    text = with_section(with_license(text, license_name), [*paragraphs, words, code, *answers])
    card.unlink(missing_ok=True)  # the file may be a hard link to a file in the store
    card.write_text(text, encoding="utf-8")


def _write_server(folder: Path, name: str, program: str, task: Task) -> list[str]:
    """Write ``serve.py`` and ``Dockerfile``, and return the card's paragraphs on them."""
    is_pair = len(task.columns) > 1 and not task.single_texts
    served = {"input": "tuple[str, str]" if is_pair else "str", "cut": task.served_cut, "largest": LARGEST}
    served["empty"] = "" if Tokenizer.from_file(str(folder / "tokenizer.json")).encode("").ids else EMPTY
    (folder / SERVE).write_text(program + SERVICE.format(**served), encoding="utf-8")
    packages = " ".join(f"{name}=={'.'.join(version(name).split('.')[:2])}.*" for name in ("onnxruntime", "tokenizers"))
    templates = [Path(__file__).with_name(f"{one}.template") for one in ("Dockerfile", "commands")]
    docker, commands = (template.read_text(encoding="utf-8") for template in templates)
    (folder / "Dockerfile").write_text(docker.format(packages=packages, file=name, folder=FOLDER), encoding="utf-8")
    limits = f'`{SERVE}` cuts longer texts, or refuses them with `"truncate": false` (422). '
    limits += f"A request has at most 256 texts (422) and {LARGEST:,} bytes of text (413)."
    return [limits, commands.strip().format(body=json.dumps({"inputs": [task.served_example]}))]


def with_section(card: str, paragraphs: list[str]) -> str:
    """Return ``card`` with a section on deployment, in place of an earlier one or at the end."""
    start, _, rest = card.partition(f"\n{HEADING}\n")
    text = "\n\n".join([HEADING, *paragraphs, END])
    return f"{start.rstrip()}\n\n{text}\n".lstrip() + rest.partition(f"\n{END}\n")[2]


def _program(folder: Path, file: str, task: Task, threads: int) -> str:
    """Return the program that answers by an ONNX file in a model's folder."""
    engine, settings = OnnxEngine(folder / file, 1), folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    return task.served_program.format(
        labels=f"labels = {[*(task.head.names or ())]!r}\n" if "labels" in task.served_reply else "",
        max_length=task.num_positions,
        side=config.get("truncation_side", "right"),
        threads=threads,
        file=file,
        fields={name: field for name, field in FIELDS.items() if name in engine.names},
        outputs=engine.outputs,
        **task.served_fields(),
    )


def _with_example(folder: Path, program: str, task: Task) -> str:
    """Return the program with a call, and with what it prints: it runs here."""
    call, names = task.served_call.format(inputs=[task.served_example]), dict[str, Any]()
    with chdir(folder):
        exec(program, names)
        reply = repr(eval(call, names))
    rounded = re.sub(r"-?\d+\.\d{5,}(e-?\d+)?", lambda match: f"{float(match[0]):.4f}", reply)
    return f"{program}\n\nprint({call})\n# {rounded}\n"
