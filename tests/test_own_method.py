"""Methods from outside: a term and a file of one's own in the working folder, without touching the package."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill_runner.common.plugins import source_hash
from helpers.command import distill_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_method"
COMMAND = ["task=demo_sentences", "teacher=base", "teacher.source=teacher", "student.num_layers=1", "method=relational"]
SHORT = ["teacher.optim.max_steps=2", "optim.max_steps=2"]


@pytest.fixture
def place(tiny_bert_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with nothing but the example and a teacher; what is imported from it is forgotten again."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "teacher").symlink_to(tiny_bert_folder)
    known = sys.path[:]
    yield tmp_path
    sys.path[:] = known
    sys.modules.pop("my_terms", None)
    sys.modules.pop("beside", None)


def key_of_student(place: Path, *overrides: str) -> str:
    ended = distill_run(place, *COMMAND, *overrides, "plan=true")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("build student")]
    assert line.endswith("ce, distances")
    return line.split()[2]


@pytest.mark.slow
def test_editing_a_term_gives_a_new_key(place: Path) -> None:
    before, again = key_of_student(place), key_of_student(place, "loss.delta=2")
    assert before != again
    file = place / "my_terms.py"
    file.write_text(file.read_text().replace("delta=self.delta", "delta=2 * self.delta"))
    assert key_of_student(place) not in (before, again)


def test_what_a_term_imports_from_beside_it_counts_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    (place / "beside.py").write_text("FACTOR = 1\n")
    (place / "my_terms.py").write_text("import torch\nfrom beside import FACTOR\n")
    before = source_hash("my_terms")
    assert source_hash("my_terms") == before
    (place / "beside.py").write_text("FACTOR = 2\n")
    assert source_hash("my_terms") != before


def test_own_choices_are_shown_and_suggested(place: Path) -> None:
    (place / "conf/method/broken.yaml").write_text("\tname: broken\n")
    assert ", relational," in distill_run(place, "--help").out
    assert "Did you mean 'relational'?" in distill_run(place, *COMMAND[:-1], "method=relationel").err
    assert "Did you mean 'loss.delta'?" in distill_run(place, *COMMAND, "loss.detla=1").err


def test_a_shipped_file_can_be_overridden(place: Path) -> None:
    (place / "conf/mapping").mkdir()
    (place / "conf/mapping/skip.yaml").write_text("rule: layer\nlayer: 77\n")
    ended = distill_run(place, *COMMAND[:4], "method=pkd", "plan=true")
    assert "mapping.layer=77: there is no teacher layer 77" in ended.err


@pytest.mark.slow
def test_a_folder_given_by_name_goes_before_that_of_the_working_folder(place: Path, tmp_path: Path) -> None:
    (place / "conf").rename(place / "elsewhere")
    assert distill_run(place, *COMMAND, "plan=true").code == 2
    ended = distill_run(place, "--config-dir", "elsewhere", *COMMAND, *SHORT, "transfer=sst2")
    assert ended.code == 0, ended.err
    assert "transfer=sst2 has no effect: nothing in this run reads it" in ended.err
    (result,) = (json.loads(file.read_text()) for file in place.glob("outputs/runs/*/result.json"))
    assert result["command"].endswith(" --config-dir elsewhere")
    assert distill_run(place, "--config-dir=nowhere", *COMMAND).err == "--config-dir=nowhere: there is no such folder\n"


TERM = """
from distill_runner.methods.base import LossTerm
class PairwiseDistances(LossTerm):
    def __init__(self, {}) -> None: ...
    def forward(self, student, teacher, batch, progress): ...
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_there\n", "cannot be imported: ModuleNotFoundError: No module named 'nothing_there'"),
        ("class PairwiseDistances\n", "its module cannot be imported: SyntaxError: expected ':'"),
        ("PairwiseDistances = 3\n", "is not a LossTerm"),
        ("x = 3\n", "the module my_terms has no class PairwiseDistances"),
        (TERM.format("version: int = 1"), "distances.version: an argument of a loss term cannot have this name"),
        (TERM.format("delta, scale"), "method.terms.distances.scale: needs a value"),  # without types
    ],
)
def test_faults_of_a_users_module_are_shown_as_what_they_are(place: Path, source: str, message: str) -> None:
    (place / "my_terms.py").write_text(source)
    ended = distill_run(place, *COMMAND, "plan=true")
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) <= 2


@pytest.mark.slow
def test_a_run_and_a_sweep_in_an_empty_folder(place: Path) -> None:
    script = Path(sys.executable).with_name("distill-run")
    for overrides in ((), ("-m", "loss.delta=0.5,1.0")):
        command = [str(script), *COMMAND, *SHORT, "store.dir=store", *overrides]
        ended = subprocess.run(command, cwd=place, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert len([*place.glob("outputs/runs/*/result.json")]) == 2
