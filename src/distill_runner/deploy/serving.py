"""A folder that serves a student: model, ONNX files, model card, and a few lines each of Python and of Docker.

``serve.py`` needs fastapi, onnxruntime and tokenizers, not torch.
"""

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from distill_runner.deploy.measure import HEADING, with_section
from distill_runner.deploy.onnx import FOLDER, OnnxEngine
from distill_runner.report.card import CARD, with_additions
from distill_runner.tasks import Task

SERVE = "serve.py"
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
SERVERS = (
    (
        {"bert", "camembert", "roberta", "xlm-roberta"},
        "docker run -p 8080:80 -v $PWD:/model ghcr.io/huggingface/text-embeddings-inference:cpu-1.9 --model-id /model",
        {"text-classification": "predict", "sentence-similarity": "embed"},
    ),
    (
        {"bert", "roberta", "xlm-roberta"},
        "vllm serve . --runner pooling",
        {"text-classification": "classify", "sentence-similarity": "v1/embeddings"},
    ),
)
"""By their documentation, of text-embeddings-inference and vLLM: values of ``model_type`` that they load, the command,
and the path of what they serve by ``pipeline_tag``."""


def write_service(
    folder: Path, model: Path, files: Sequence[Path], served: Path, task: Task, section: Sequence[str], picture: Path
) -> None:
    """Write the folder that serves a student, in place of an earlier one, whose license its card keeps.

    Args:
        model: folder of the student's model.
        files: its ONNX files; ``served`` is the one that is served.
        task: what it was trained for.
        section: paragraphs for the card, as Markdown.
        picture: of the frontier, for the card.
    """
    card = folder / CARD
    previous = card.read_text(encoding="utf-8") if card.is_file() else ""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(FOLDER))
    (folder / FOLDER).mkdir()
    for file in files:
        shutil.copyfile(file, folder / FOLDER / file.name)
    shutil.copyfile(picture, folder / picture.name)
    name = f"{FOLDER}/{served.name}"
    parts = [HEADING, *section, f"![The frontier]({picture.name})", serving_commands(folder, name, task)]
    text = with_additions(card.read_text(encoding="utf-8"), previous)
    card.write_text(with_section(text, "\n\n".join(parts) + "\n"), encoding="utf-8")
    (folder / SERVE).write_text(serving_program(folder, name, task), encoding="utf-8")
    packages = " ".join(f"{name}=={'.'.join(version(name).split('.')[:2])}.*" for name in ("onnxruntime", "tokenizers"))
    (folder / "Dockerfile").write_text(DOCKER.format(packages=packages, file=name, folder=FOLDER), encoding="utf-8")


def serving_program(folder: Path, file: str, task: Task) -> str:
    """Return the program that answers requests by an ONNX file in a student's folder, for fastapi."""
    engine, config = OnnxEngine(folder / file, 1), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return task.served_program.format(
        max_length=task.num_positions,
        padding=config.get("pad_token_id") or 0,
        file=file,
        fields={name: field for name, field in FIELDS.items() if name in engine.names},
        outputs=engine.outputs,
        **task.served_fields(),
    )


def serving_commands(folder: Path, file: str, task: Task) -> str:
    """Return how to serve the folder, as Markdown: with its own files and, where they load it, with two servers.

    The servers get no prompt from these commands, so they are not named for a task with one.
    """
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    body = json.dumps({"inputs": ["a text" if len(task.columns) == 1 or task.single_texts else task.columns]})
    lines = ["pip install fastapi uvicorn numpy onnxruntime tokenizers && uvicorn serve:app"]
    lines += ["docker build -t student . && docker run -p 8000:8000 student"]
    lines += [f"curl localhost:8000/predict -H 'Content-Type: application/json' -d '{body}'"]
    for models, command, paths in SERVERS:
        if kind in models and task.pipeline_tag in paths and not task.served_prompt():
            lines.append(f"{command}  # POST /{paths[task.pipeline_tag]}")
    return "\n".join([f"`{SERVE}` serves `{file}`; in this folder:", "", "```sh", *lines, "```"])
