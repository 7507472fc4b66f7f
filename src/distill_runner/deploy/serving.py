"""A folder that serves a student: model, ONNX files, model card, and a few lines each of Python and of Docker.

``serve.py`` needs fastapi, onnxruntime and tokenizers, not torch.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distill_runner.deploy.measure import HEADING, with_section
from distill_runner.deploy.onnx import FOLDER, OnnxEngine
from distill_runner.report.card import CARD, with_additions
from distill_runner.tasks import Task

SERVE, DOCKERFILE = "serve.py", "Dockerfile"
FIELDS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
"""Inputs of a model, by what the library tokenizers calls them."""
DOCKER = """\
FROM python:3.12-slim
RUN pip install --no-cache-dir fastapi uvicorn numpy {packages}
RUN useradd --create-home app
USER app
WORKDIR /home/app
COPY config.json tokenizer.json serve.py ./
COPY {file} {folder}/
ENV OMP_NUM_THREADS=1
EXPOSE 8000
CMD ["uvicorn", "serve:app", "--host", "0.0.0.0", "--port", "8000"]
"""
TEI_MODELS = {"bert", "camembert", "roberta", "xlm-roberta"}
"""Values of ``model_type`` that text-embeddings-inference loads, by its documentation."""
TEI = "docker run -p 8080:80 -v $PWD:/model ghcr.io/huggingface/text-embeddings-inference:cpu-1.9 --model-id /model"
TEI_PATHS = {"text-classification": "predict", "sentence-similarity": "embed"}
"""What text-embeddings-inference serves, by ``pipeline_tag``."""
VLLM_MODELS = {"bert", "roberta", "xlm-roberta"}
VLLM = "vllm serve . --runner pooling"
VLLM_PATHS = {"text-classification": "classify", "sentence-similarity": "v1/embeddings"}
"""What vLLM serves, by ``pipeline_tag``; by its documentation, like ``VLLM_MODELS``."""


@dataclass(frozen=True)
class Service:
    """A folder to serve, with the file that it serves."""

    folder: Path
    file: str
    task: Task

    @property
    def program(self) -> str:
        """The program that answers requests, for fastapi."""
        engine = OnnxEngine(self.folder / self.file, 1)
        return self.task.served_program.format(
            max_length=self.task.num_positions,
            padding=self._config.get("pad_token_id") or 0,
            file=self.file,
            fields={name: field for name, field in FIELDS.items() if name in engine.names},
            outputs=engine.outputs,
            **self.task.served_fields(),
        )

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config

    def write_card(self, table: str, notes: Sequence[str], picture: Path) -> None:
        """Add the frontier and the commands that serve the folder to the model's card.

        Args:
            table, notes: of the frontier, as Markdown.
            picture: of the frontier; it is copied.
        """
        shutil.copyfile(picture, self.folder / picture.name)
        card = self.folder / CARD
        text = card.read_text(encoding="utf-8")
        parts = [HEADING, table, *notes, f"![The frontier]({picture.name})", *self.commands]
        card.write_text(with_section(text, "\n\n".join(parts) + "\n"), encoding="utf-8")

    @property
    def commands(self) -> list[str]:
        """How to serve the folder, as Markdown: with its own files and, where they load it, with two servers.

        The servers get no prompt from these commands, so they are not named for a task with one.
        """
        kind, tag = self._config.get("model_type"), None if self.task.served_prompt() else self.task.pipeline_tag
        lines = ["pip install fastapi uvicorn numpy onnxruntime tokenizers && uvicorn serve:app"]
        lines += ["docker build -t student . && docker run -p 8000:8000 student"]
        is_single = len(self.task.columns) == 1 or self.task.single_texts
        body = json.dumps({"inputs": ["a text" if is_single else self.task.columns]})
        lines += [f"curl localhost:8000/predict -H 'Content-Type: application/json' -d '{body}'"]
        notes = [f"`{SERVE}` serves `{self.file}`; in this folder:"]
        if kind in TEI_MODELS and tag in TEI_PATHS:
            lines += [f"{TEI}  # POST /{TEI_PATHS[tag]}"]
        if kind in VLLM_MODELS and tag in VLLM_PATHS:
            lines += [f"{VLLM}  # POST /{VLLM_PATHS[tag]}"]
        return [*notes, "\n".join(["```sh", *lines, "```"])]


def write_service(folder: Path, model: Path, files: Sequence[Path], served: Path, task: Task) -> Service:
    """Write the folder that serves a student, in place of an earlier one, whose license its card keeps.

    Args:
        model: folder of the student's model.
        files: its ONNX files; ``served`` is the one that is served.
        task: what it was trained for.
    """
    card = folder / CARD
    previous = card.read_text(encoding="utf-8") if card.is_file() else ""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(FOLDER))
    (folder / FOLDER).mkdir()
    for file in files:
        shutil.copyfile(file, folder / FOLDER / file.name)
    card.write_text(with_additions(card.read_text(encoding="utf-8"), previous), encoding="utf-8")
    service = Service(folder, f"{FOLDER}/{served.name}", task)
    (folder / SERVE).write_text(service.program, encoding="utf-8")
    packages = " ".join(f"{name}=={'.'.join(version(name).split('.')[:2])}.*" for name in ("onnxruntime", "tokenizers"))
    program = DOCKER.format(packages=packages, file=service.file, folder=FOLDER)
    (folder / DOCKERFILE).write_text(program, encoding="utf-8")
    return service
