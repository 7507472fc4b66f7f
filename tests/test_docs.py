"""What the documentation says can be typed: every command composes, pages build, the notebook runs."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from distill_runner import api
from distill_runner.commands.parser import SUBCOMMANDS, parser_of, subcommand_of
from distill_runner.compose.folders import choices, configuration_keys
from distill_runner.report.collect import read_results
from helpers.command import distill_run

ROOT = Path(__file__).parents[1]
GENERATED = {"_build", "options"}
"""Folders of ``docs`` that are not in the repository."""
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if not GENERATED & {*path.parts})]
NOTEBOOK = ROOT / "examples" / "notebook" / "results.ipynb"


SHELL = "distill-run() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }\n"
"""The console script prints its arguments; nothing else is found, so that blocks can be run for their words."""


def commands(page: Path) -> Iterator[tuple[str, ...]]:
    """The arguments of distill-run in a page's fenced blocks as a shell reads them, variables filled in."""
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        if re.search(r"^distill-run", block, re.MULTILINE):
            variables = "".join(re.findall(r"^\w+=.*\n", "".join(blocks[:number]), re.MULTILINE))
            script = SHELL + re.sub(r"<([\w /.]+)>", r"_\1_", variables + block)
            ran = subprocess.run(["/bin/bash", "-c", script], env={"PATH": ""}, capture_output=True, text=True)
            for call in ran.stdout.split("\n\0")[:-1]:
                yield tuple(call.split("\0")[:-1])
    for words in map(str.split, inline(page)):
        if words[0] == "distill-run" and len(words) > 2 and "<Tab>" not in words[-1] and words[2][0] != "[":
            yield tuple(shlex.split(re.sub(r"<([\w /.]+)>", r"_\1_", " ".join(words)))[1:])


def inline(page: Path) -> list[str]:
    """The code between single backticks, in sentences and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [code.replace(r"\|", "|") for code in re.findall(r"`([^`\n]+)`", text) if code.strip()]


COMMANDS = sorted({(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands(page)})


REFUSED = {
    "pip": "changes the environment of the tests",
    "export": "names a folder of the reader",
    "eval": "completes commands in the reader's shell; tests/test_subcommands.py starts one",
    "mutmut": "takes hours",
    "torchrun": "starts processes; tests/test_distributed.py runs it",
    "srun": "needs Slurm",
    "wandb": "needs an account or a terminal; tests/test_wandb.py runs its agent",
    "cd": "enters a folder of the reader",
    "docker": "needs its daemon",
    "kubectl": "needs a cluster; tests/test_containers.py plans the commands of the manifest",
    "sky": "needs a cloud; tests/test_containers.py plans the commands of the manifest",
    "curl": "asks a server; tests/test_frontier.py asks one",
    "hf": "needs an account of the hub",
}
"""Programs whose commands no test runs, and why."""


def other_commands(page: Path) -> Iterator[list[str]]:
    """The words of the other programs' commands in a page's blocks for a shell; other blocks also have outputs."""
    for language, block in re.findall(r"^```(sh)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        text = re.sub(r'^(\w+="[^"]*"[;\s]*|\w+=\S*\s*$)+', "", block.replace("\\\n", " "), flags=re.MULTILINE)
        for line in text.splitlines():
            words = re.sub(r"^(\w+=\S+ )+", "", line.partition("#")[0].strip()).split()
            is_known = bool(words) and words[0] in {*REFUSED, "make", "python"}
            if words and not words[0].startswith("distill-run") and (language or is_known):
                yield words


def test_every_command_is_checked_or_refused_for_a_reason() -> None:
    """Prints how many commands and snippets there are, and which test checks them."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    counts = {
        "composed": sum(not subcommand_of(command) for _, command in COMMANDS),
        "subcommands, parsed": sum(bool(subcommand_of(command)) for _, command in COMMANDS),
        "snippets, run": sum(page.read_text().count("\n```python\n") for page in PAGES if page.name != "notebook.md"),
    }
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for words in other_commands(page):
            program, first = words[0], words[1] if len(words) > 1 else ""
            if program == "make":
                assert first in targets, (page, words)
                kind = "targets of make, found"
            elif program == "python" and first.startswith("$"):
                kind = "refused, python: the programs of a measurement are not in this repository"
            elif program == "python":
                file = words[2].replace(".", "/") + ".py" if first == "-m" else first
                package = file.removesuffix(".py") + "/__main__.py"
                assert [*ROOT.glob(file), *ROOT.glob(package), *ROOT.glob(f"src/{package}")], words
                kind = "programs of the repository, found"
            else:
                assert program in REFUSED, f"{page}: {' '.join(words)}"
                kind = f"refused, {program}: {REFUSED[program]}"
            counts[kind] = counts.get(kind, 0) + 1
    print("\n".join(f"{count:4} {kind}" for kind, count in counts.items()))
    assert counts["composed"] > 80


def first_point(words: Sequence[str]) -> list[str]:
    """Of a run or a sweep the overrides of one point, without Hydra's own and without options."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import IntervalSweep

    from distill_runner.compose.command_line import expand_shorthand

    kept = []
    given = [expand_shorthand(word) for word in words if "=" in word and not word.startswith(("hydra", "-"))]
    for override in OverridesParser.create().parse_overrides(given):
        if override.is_interval_sweep():
            interval = override.value()
            assert isinstance(interval, IntervalSweep)
            kept.append(f"{override.get_key_element()}={interval.start}")
        elif override.is_sweep_override():
            value = next(iter(override.sweep_string_iterator()))
            kept.append(f"{override.get_key_element()}={value}")
        else:
            kept.append(str(override.input_line))
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [pair for pair in COMMANDS if not subcommand_of(pair[1])])
def test_a_command_of_the_documentation_composes(
    page: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, names and keys are there; with the method of one's own that a page is about."""
    monkeypatch.chdir(ROOT / "examples" / "own_method")
    api.composed(*first_point(command))


OF_OTHERS = re.compile(
    r"(\w+\.)?(scale_by_t2|standardize|combine|over_rows|compare|width|states)"  # options of terms, by the term's name
    r"|name|write_predictions|outputs|progress|multi_label|new_key|terms|key|optim\.lrr"  # of Python and of files
    r"|hydra\.(launcher|sweeper)\.\w+|address|local_lock"  # of plugins and file systems
    r"|teacher\.optim\.max_steps|stages\..*|task\.test\.\w+|method\.terms\..*"  # added to the configuration
)
"""Keys in inline code that are no keys of a composed configuration, but of a plugin, a term, a file or Python."""


def test_overrides_in_sentences_and_tables_exist() -> None:
    """Of ``key=value`` in inline code: the key is one of the configuration, and a group has the choices."""
    keys, wrong, count = configuration_keys(), list[str](), 0
    for page in PAGES:
        for word in (word for code in inline(page) for word in code.split()):
            if match := re.fullmatch(r"\+*([a-z_][\w./]*)=([^\s\"<]*)", word):
                key, names = match[1], {*re.split(r"[|,]", match[2])} - {""}
                is_choice = names <= {*choices(key), "relational"} or key.startswith("hydra/")
                count += 1
                if not (is_choice if choices(key) else key in keys or OF_OTHERS.fullmatch(key)):
                    wrong.append(f"{page.name}: {word}")
    assert count > 500
    assert wrong == []


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
    (result,) = read_results([tmp_path / "outputs" / "runs"])
    assert result["score"] is not None


def replaced(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """``words`` with the values of ``others``, which follow where there is no such key."""
    keys = {word.partition("=")[0] for word in others}
    return [*(word for word in words if word.partition("=")[0] not in keys), *others]


def test_prose_has_one_sentence_a_line_and_no_banned_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    prose = import_module("prose")
    assert prose.formatted("- One. Two\n  `a. B` words.\n") == "- One.\n  Two `a. B` words.\n"
    pages = {page: page.read_text() for page in prose.pages()}
    unsplit = [str(page.relative_to(ROOT)) for page, text in pages.items() if text != prose.formatted(text)]
    assert unsplit == [], "python docs/_ext/prose.py --write"
    banned = {page: prose.banned_in(text) for page, text in pages.items() if page != prose.STYLE}
    assert {page: words for page, words in banned.items() if words} == {}


def test_the_documentation_is_no_longer_than_a_reader_needs() -> None:
    """Words as ``wc -w`` counts them, bars of tables included, without README and the generated reference."""
    assert sum(len(page.read_text().split()) for page in PAGES if page.name != "README.md") <= 52_000


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.stem)
def test_a_page_begins_with_a_command(page: Path) -> None:
    """Below its title, before the first sentence; the page of options and that of Python begin with their own code."""
    _, start, *_ = page.read_text().split("\n\n")
    assert re.match(r"```(sh|python)?\n(pip|make|python|distill-run|wandb|from|torchrun|export|\w+=)", start), start


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    """Also without ``make docs``; the picture of the packages alone is drawn with the site."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = {target for target in re.findall(r"\]\((?!https:)([^)#\s]+)", text) if target != "architecture.svg"}
    assert [name for name in targets if GENERATED & {*Path(name).parts} or not (page.parent / name).exists()] == []
    for name, anchor in re.findall(r"\]\((?!https:)([^)#\s]*)#([^)\s]+)\)", text):
        text = (page.parent / name if name else page).read_text().lower().replace(",", "")
        titles = re.findall("^#+ (.*)", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
        assert anchor in {re.sub(r"[\W_]+", "-", title).strip("-") for title in titles}


def test_the_page_of_errors_repeats_messages_that_are_tested() -> None:
    """Each of its rows is one of those whose input tests/test_cli.py types."""
    rows = re.findall(r"^\| `.*", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    tested = (ROOT / "tests" / "faults" / "bad_inputs.md").read_text().splitlines()
    assert len(rows) > 5
    assert [row for row in rows if row not in tested] == []


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        return import_module("configuration_reference")


def test_every_option_of_the_reference_has_a_meaning(reference: ModuleType) -> None:
    lines = [line for text in reference.pages().values() for line in text.splitlines()]
    assert [line for line in lines if re.match(r"\| `.*\|  \|", line)] == []


def test_the_reference_has_every_subcommand_with_its_options(reference: ModuleType) -> None:
    page = reference.pages()["subcommands"]
    for name in SUBCOMMANDS:
        section = page.partition(f"\n## `distill-run {name}`\n")[2].partition("\n## ")[0]
        options = re.findall(r"(--[a-z][\w-]*)", parser_of(name).format_usage())
        assert options == [option for option in options if f"`{option}`" in section], name


@pytest.mark.slow
def test_the_commands_of_the_reference_print_their_group(reference: ModuleType) -> None:
    texts = "\n".join(reference.pages().values())
    commands = re.findall(r"^distill-run (.*) --cfg job --package (.*)$", texts, re.MULTILINE)
    assert len(commands) > 20
    missing = [group for overrides, group in commands if group not in api.composed(*overrides.split())]
    assert missing == []


OTHER_CHOICES = ("teacher=ensemble", "teacher=compact", "tracker=wandb", "experiment=demo_images")
PRETRAINED = "method=pdf pretraining=mlm_nsp_two_lengths"


@pytest.mark.parametrize(
    "overrides",
    [
        "method=prokd",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (PRETRAINED, *OTHER_CHOICES, *(f"method={name}" for name in choices("method")))
        ),
    ],
)
def test_the_reference_lists_every_option_of_a_composed_configuration(overrides: str, reference: ModuleType) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", "\n".join(reference.pages().values()), re.MULTILINE)
    configuration = OmegaConf.to_container(api.composed("task=rte", *overrides.split()), resolve=False)
    keys = [key for key in leaves(configuration) if not reference.NO_OPTION.search(key)]
    assert len(keys) > 100
    assert [key for key in keys if not reference.is_listed(key, rows)] == []
    assert not reference.is_listed("loss.etta", rows)


def leaves(node: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of the values below ``node``."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path


@pytest.mark.parametrize(("page", "command"), [pair for pair in COMMANDS if subcommand_of(pair[1])])
def test_the_options_of_a_subcommand_in_the_documentation_exist(page: str, command: tuple[str, ...]) -> None:
    name = subcommand_of(command)
    assert name is not None
    parser_of(name).parse_args(command[1:])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=600)
    assert (tmp_path / "scores.png").stat().st_size > 10_000
