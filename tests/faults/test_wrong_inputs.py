"""Inputs that are wrong: refused in one or two lines that name the key, before anything is trained.

``FAULTS=long`` (``make faults``) tries all of them, other runs some of each kind.
"""

import json
import pickle
import re
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from faults.forked import LONG
from helpers.command import Ended, check_offers, distill_run

pytestmark = pytest.mark.faults
HERE = Path(__file__).parent
BASE = "task=custom task.dataset=data task.columns=[sentence1,sentence2] task.max_length=48"
BASE += " teacher=base teacher.source=model student.num_layers=2 runtime.device=cpu"
SECONDS = 300
"""After which an input hangs."""
Input = TypeVar("Input")
Try = Callable[..., Ended]


class Hangs(BaseException):
    """So that no handler of errors takes it for one."""


def some(inputs: Sequence[Input], every: int) -> Sequence[Input]:
    """All of them, or every so many-th in the short form."""
    return inputs if LONG else inputs[::every]


def rows(name: str) -> list[tuple[str, str]]:
    """What is typed, and words of what is printed."""
    lines = (line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#"))
    return [(typed, words) for typed, _, words in (line.rpartition("  ->  ") for line in lines)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_task_folder: Path, tiny_bert_folder: Path) -> Path:
    """A folder with data and a model that are whole, and labels that are none."""
    folder = tmp_path_factory.mktemp("wrong")
    shutil.copytree(tiny_task_folder, folder / "data")
    shutil.copytree(tiny_bert_folder, folder / "model")
    (folder / "a_file").write_text("")
    (folder / "conf" / "task").mkdir(parents=True)
    (folder / "conf" / "task" / "bare.yaml").write_text("dataset: data")
    labels: dict[str, list[Any]] = {"lists": [[0], [1]], "structs": [{"a": 0}, {"a": 1}], "nulls": [None, None]}
    labels["numbers"] = [1.5, 2.5]
    for name, values in labels.items():
        (folder / name).mkdir()
        pair = [json.dumps({"sentence1": "one", "sentence2": "two", "label": value}) for value in values]
        for split in ("train", "validation"):
            (folder / name / f"{split}.jsonl").write_text("\n".join(pair * 4))
    for name, content in {"not_json": b"{", "binary": bytes(range(256))}.items():
        (folder / name).mkdir()
        for split in ("train", "validation"):
            (folder / name / f"{split}.jsonl").write_bytes(content)
    return folder


@pytest.fixture
def attempt(place: Path, tally: Counter[str]) -> Try:
    """The command that works with more behind it, its end counted."""

    def end(*_: Any) -> None:
        raise Hangs(f"after {SECONDS} s")

    def tried(*more: str, base: str = BASE) -> Ended:
        tally["wrong inputs"] += 1
        before = signal.signal(signal.SIGALRM, end)
        signal.alarm(SECONDS)
        try:
            method = [] if any(part.lstrip("+~").startswith("method") for part in more) else ["method=alp"]
            return distill_run(place, *base.split(), *more, *method)
        except BaseException as error:
            tally["hangs" if isinstance(error, Hangs) else "tracebacks"] += 1
            raise
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return tried


PLANNED = re.compile(
    r"(build|hit|stage|trying|data|scores|lengths|weights|warning:) |assumptions, |[\w.]+  +\S| {6,}\S|recipe"
    r"|  [\w.]+=\S*: "
)
"""Lines of a plan."""


def told(ended: Ended) -> list[str]:
    """What is printed besides the plan."""
    return [line for line in ended.err.splitlines() if not PLANNED.match(line)]


def check_refused(ended: Ended, words: str) -> None:
    assert ended.code == 2, (ended.code, ended.err[-500:], ended.out[-500:])
    assert 1 <= len(told(ended)) <= 2, ended.err
    assert words in "\n".join(told(ended))
    assert all(len(line) < 600 for line in told(ended))


def replaced(typed: str, offer: Sequence[str]) -> bool:
    """Whether an offer sets what was typed, or a part of it, and so takes its place."""
    return any(f"{part.partition('=')[0]}.".startswith(f"{typed.lstrip('+').partition('=')[0]}.") for part in offer)


@pytest.mark.parametrize(("typed", "words"), some(rows("wrong_inputs.txt"), 12))
def test_it_is_refused(attempt: Try, typed: str, words: str) -> None:
    arguments = [*shlex.split(typed), "plan=true"]
    ended = attempt(*arguments)
    check_refused(ended, words)
    check_offers(lambda *offer: attempt(*(part for part in arguments if not replaced(part, offer)), *offer), ended)


@pytest.mark.parametrize(("change", "words"), some(rows("wrong_configs.txt"), 8))
def test_a_teacher_that_cannot_be_built_is_refused(
    attempt: Try, place: Path, tmp_path: Path, change: str, words: str
) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | json.loads(change)))
    check_refused(attempt(f"teacher.source={folder}", "plan=true"), words)


FILES = {
    "config.json": ["", "[]", "5", "null", "{", "\x00\x01", '{"a": 1}'],
    "tokenizer.json": ["[]", "5", "{", "{}", "\x00", '{"model": 5}'],
    "tokenizer_config.json": ["[]", "{", "5"],
}


@pytest.mark.parametrize(
    ("name", "content"), some([(name, content) for name, each in FILES.items() for content in each], 5)
)
def test_a_teachers_file_that_is_none_is_refused(
    attempt: Try, place: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "teacher")
    (folder / name).write_text(content)
    check_refused(attempt(f"teacher.source={folder}"), str(folder))


class Harmful:
    """Unpickled, it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_pickle_for_weights_is_refused(attempt: Try, place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "teacher")
    (folder / "model.safetensors").unlink()
    weights = {"embeddings.word_embeddings.weight": Harmful(tmp_path / "executed")}
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(weights))
    check_refused(attempt(f"teacher.source={folder}"), "are not read")
    assert not (tmp_path / "executed").exists()


YAML = {
    "duplicate keys": ("name: mine\nname: mine\n", "mine.yaml"),
    "a tab": ("name: mine\n\tmax_length: 3\n", "mine.yaml"),
    "a loop of defaults": ("defaults:\n  - mine\nname: mine\n", "in a circle"),
    "a tag of Python": ("name: !!python/object/apply:os.system ['touch executed']\n", "mine.yaml"),
    "a list": ("- 1\n- 2\n", "mine"),
    "nothing": ("", "task"),
    "half a list": ("columns: [a, b\n", "mine.yaml"),
    "no text at all": ("\x00\x01\x02", "mine.yaml"),
    "a default that is not there": ("defaults:\n  - nowhere\nname: mine\n", "nowhere"),
    "an interpolation that is none": ("name: ${oops\n", "GrammarParseError"),
}


@pytest.mark.parametrize("case", some([*YAML], 4))
def test_a_file_of_ones_own_is_refused(attempt: Try, place: Path, tmp_path: Path, case: str) -> None:
    content, words = YAML[case]
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(content)
    mine = BASE.replace("task=custom", "task=mine")
    check_refused(attempt("--config-dir", str(tmp_path), "plan=true", base=mine), words)
    assert not (place / "executed").exists()


KEYS = "optim.lr optim.batch_size optim.epochs optim.warmup optim.clip optim.schedule loss.eta loss.lambda "
KEYS += "loss.temperature seed runtime.threads runtime.device runtime.precision runtime.targets student.num_layers "
KEYS += "student.init.layers student.init.source teacher.source teacher.fine_tuned task.max_length task.columns "
KEYS += "task.labels task.metrics task.label task.train task.type method.weights.kd mapping.rule stage sweep.halving"
VALUES = "inf -1 1e300 abc true [1] {a:1} null 10000000000000000000000 '' ${nope} a/b"
TEXT = st.characters(codec="utf-8", exclude_characters="\0")


def check_harmless(ended: Ended) -> None:
    """It is refused, or means something."""
    assert ended.code in (0, 2), ended.err
    assert ended.code == 0 or len(told(ended)) <= 2, ended.err


@settings(max_examples=100 if LONG else 10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(KEYS.split()), st.sampled_from(VALUES.split()) | st.text(TEXT, max_size=20))
@example("optim.lr", "${nope}")  # looked at again, by what explains the error
def test_any_text_for_any_key(attempt: Try, key: str, text: str) -> None:
    check_harmless(attempt(f"{key}={text}", "plan=true"))
