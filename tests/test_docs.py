"""What the documentation says can be typed: every command composes, pages build, the notebook runs."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from command import distill_run
from distill_runner.commands import arguments
from distill_runner.report.collect import results

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
NOTEBOOK = ROOT / "examples" / "notebook" / "results.ipynb"


SCRIPTS = ("run", "run-table", "run-analyse", "run-predict", "run-export", "run-store", "run-submit", "run-dashboard")
SHELL = "".join(f"distill-{name}() {{ printf '%s\\0' distill-{name} \"$@\"; printf '\\n\\0'; }}\n" for name in SCRIPTS)
"""Console scripts that print what they are given; nothing else is found, so that blocks can be run for their words."""


def commands(page: Path) -> Iterator[tuple[str, ...]]:
    """The commands of a page's fenced blocks as a shell reads them, variables filled in; <run> stays a name."""
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        if re.search(r"^distill-run", block, re.MULTILINE):
            variables = "".join(re.findall(r"^\w+=.*\n", "".join(blocks[:number]), re.MULTILINE))
            script = SHELL + re.sub(r"<([\w /.]+)>", r"_\1_", variables + block)
            ran = subprocess.run(["/bin/bash", "-c", script], env={"PATH": ""}, capture_output=True, text=True)
            for call in ran.stdout.split("\n\0")[:-1]:
                yield tuple(call.split("\0")[:-1])


COMMANDS = sorted({(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands(page)})


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 30


def first_point(words: Sequence[str]) -> list[str]:
    """Of a run or a sweep the overrides of one point, without Hydra's own and without options."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from distill_runner.compose.command_line import shorthand

    kept = []
    given = [shorthand(word) for word in words if "=" in word and not word.startswith(("hydra", "-"))]
    for override in OverridesParser.create().parse_overrides(given):
        if override.is_sweep_override():
            value = next(iter(override.sweep_string_iterator()))
            kept.append(f"{override.get_key_element()}={value}")
        else:
            kept.append(str(override.input_line))
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [pair for pair in COMMANDS if pair[1][0] == "distill-run"])
def test_a_command_of_the_documentation_composes(
    page: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, names and keys are there; with the method of one's own that a page is about."""
    from distill_runner import api

    monkeypatch.chdir(ROOT / "examples" / "own_method")
    api.composed(*first_point(command[1:]))


MORE_DATA = ROOT / "docs" / "tutorials" / "more-data.md"
RECIPES = re.findall(r"^<!-- shortened: (.*?) -->\n```sh\n(.*?)^```", MORE_DATA.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shorter", "block"), RECIPES, ids=re.findall(r"^## (.*)", MORE_DATA.read_text(), re.MULTILINE)
)
def test_a_recipe_for_own_data_trains(tmp_path: Path, tiny_bert_folder: Path, shorter: str, block: str) -> None:
    """Every command of the page, on the files that its script makes, shortened by the overrides of its comment."""
    subprocess.run([sys.executable, str(ROOT / "examples" / "own_data" / "make.py")], cwd=tmp_path, check=True)
    text = f"teacher=base teacher.source={tiny_bert_folder} student.num_layers=2 task.max_length=64"
    given = shorter.format(text=text, tiny=tiny_bert_folder).split()
    ended = distill_run(tmp_path, *replaced(shlex.split(block.replace("\\\n", " "))[1:], given), "runtime.device=cpu")
    assert ended.code == 0, ended.err
    (result,) = results([tmp_path / "outputs" / "runs"])
    assert result["score"] is not None


def replaced(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """``words`` with the values of ``others``, which follow where there is no such key."""
    keys = {word.partition("=")[0] for word in others}
    return [*(word for word in words if word.partition("=")[0] not in keys), *others]


def test_every_option_of_the_reference_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    reference = import_module("configuration_reference")
    silent = [
        f"{prefix}: {name}"
        for prefix, schema in reference.SCHEMAS.items()
        for name in schema.model_fields
        if not reference.described(schema).get(name)
    ]
    assert silent == []


class Understood(Exception):
    """The options of a command have been read."""


@pytest.mark.parametrize(("page", "command"), [pair for pair in COMMANDS if pair[1][0] != "distill-run"])
def test_a_command_of_the_documentation_is_understood(
    page: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of the other console scripts are there."""

    def parse(self: argparse.ArgumentParser, words: Sequence[str]) -> None:
        argparse.ArgumentParser.parse_args(self, words)
        raise Understood

    monkeypatch.setattr(arguments.Parser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [*command])
    with pytest.raises(Understood):
        import_module(f"distill_runner.commands.{command[0].removeprefix('distill-run-')}").main()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=600)
    assert (tmp_path / "scores.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path / "html")]
    subprocess.run(command, check=True, timeout=600)
    assert "warmup" in (tmp_path / "html" / "reference" / "configuration.html").read_text()
