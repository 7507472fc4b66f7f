"""The command line from end to end on a small teacher: what it prints, leaves behind, finds again and refuses."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from distill_runner.analysis.finished_run import FinishedRun
from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.compose.command_line import hydra_arguments
from distill_runner.compose.folders import choices
from distill_runner.pipeline.store import IN_USE
from distill_runner.training.devices import Device, run_errors
from helpers.command import Ended, check_offers, distill_run

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "faults" / "bad_inputs.md"
SMALL = (
    "student.num_layers=2",
    "task.max_length=48",
    "optim.epochs=2",
    "optim.batch_size=16",
    "teacher.optim.epochs=2",
)
FAST = ("optim.lr=3e-3", "teacher.optim.lr=3e-3", "runtime.device=cpu")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distill_runner", *arguments]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **changes}


def without_importing(
    modules: set[str], folder: Path, *arguments: str, code: int = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``, and check that it imports none of ``modules`` and ends with ``code``."""
    program = f"""
import sys
from distill_runner.cli import main
try:
    main()
finally:
    print("imported:", {modules} & set(sys.modules), file=sys.stderr)"""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(**changes),
    )
    assert ended.returncode == code
    assert "imported: set()" in ended.stderr
    return ended


@pytest.fixture(scope="module")
def inputs(tiny_task_folder: Path, tiny_bert_folder: Path) -> tuple[str, ...]:
    """The overrides that make a small run on small data."""
    data = ("task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]")
    return (*data, "teacher=base", f"teacher.source={tiny_bert_folder}", "teacher.name=tiny", *SMALL, *FAST)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def alp(workplace: Path, inputs: tuple[str, ...]) -> Ended:
    """A run of ALP in ``workplace``, the first one there."""
    ended = distill_run(workplace, *inputs, "method=alp")
    assert ended.code == 0, ended.err
    return ended


def run_folder(ended: Ended) -> Path:
    """The folder that the result names."""
    found = re.search(r"^  folder +(.*)$", ended.out, re.MULTILINE)
    assert found, ended
    return Path(found[1])


def result_of(ended: Ended) -> dict[str, Any]:
    return dict(json.loads((run_folder(ended) / "result.json").read_text()))


# Asking without running.
ACCOUNT = ("data ", "lengths ", "weights ", "scores ", "classes ", "warning: ")
"""How the lines of an account begin."""


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (["transfer.size=9"], ["transfer.size=9"]),
        (["teacher.sources=[a/b,c/d]"], ["teacher.sources=[a/b,c/d]"]),  # a list with slashes, and no metrics
        (["task.metrics=[f1,evaluate:x?a=b]"], ["task.metrics=['f1','evaluate:x?a=b']"]),
        (["-m", "transfer.size=9", "seed=1"], ["transfer.size=choice(9)", "seed=1", "-m"]),
        (["-m", "optim.max_steps=null"], ["optim.max_steps=null,null", "-m"]),
        (["sweep=demo/grid", "optim.lr=1e-5,2e-5"], ["sweep=demo/grid", "optim.lr=1e-5,2e-5", "-m"]),
        (["sweep=demo/grid", "loss.eta=1", "--cfg", "job"], ["sweep=demo/grid", "loss.eta=1", "--cfg", "job"]),
        (["-m", "optim.betas=[0.9,0.98]", "+a.b=1"], ["optim.betas=[0.9,0.98]", "+a.b=1", "-m"]),
        (
            ["-m", "runtime.threads=1", "hydra.launcher.n_jobs=2"],
            ["runtime.threads=1", "hydra.launcher.n_jobs=2", "-m"],
        ),
        (["-m", "student.init=random"], ["student.init.layers=choice(random)", "-m"]),
    ],
)
def test_a_value_in_a_sweep_is_an_axis(given: list[str], parsed: list[str]) -> None:
    assert hydra_arguments(given) == parsed


def test_help_and_completion_need_no_library(workplace: Path) -> None:
    heavy = {"torch", "transformers", "datasets", "sklearn", "scipy", "numpy", "pydantic", "wandb", "joblib"}

    def started(arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return without_importing(heavy, workplace, *arguments.split(), code=0, **changes)

    helped = re.sub(r"\n  (?=\w)", " ", started("--help").stdout)  # a long line goes on in the next
    for group in ("task", "method", "mapping", "attention", "teacher", "student", "optim", "tracker", "experiment"):
        assert re.search(rf"^{group}: {', '.join(choices(group))}$", helped, re.MULTILINE), group
    for key in (
        "loss.temperature",
        "student.init",
        "runtime.precision",
        "store.dir",
        "plan",
        "distill-run -m task=rte",
    ):
        assert key in helped
    line = "distill-run method=pk"
    completed = started("-sc query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert completed.stdout.split() == ["method=pkd", "method=pkd_original"]


def test_a_plan_trains_nothing_and_what_does_not_run_leaves_no_folder(tmp_path: Path, inputs: tuple[str, ...]) -> None:
    planned = distill_run(tmp_path, *inputs, "method=alp", "plan=true")
    assert (planned.code, planned.out) == (0, "")
    assert "updates in total" not in planned.err  # it measures a few updates of many
    lines = [re.split(r"\s+", line, maxsplit=3) for line in planned.err.splitlines()]
    assert [(state, name) for state, name, *_ in lines if state in ("build", "hit")] == [
        ("build", "teacher"),
        ("build", "targets"),
        ("build", "student"),
    ]
    assert "tiny_task0: 2 layers x 32" in planned.err
    assert not list(tmp_path.rglob("model.safetensors"))
    assert distill_run(tmp_path, *inputs, "method=alp", "student.num_layers=99").code == 2
    assert not list(tmp_path.glob("outputs/runs/*"))


# Running.


def test_a_run_leaves_its_result(alp: Ended, workplace: Path, inputs: tuple[str, ...]) -> None:
    folder = run_folder(alp)
    assert folder.parent == workplace / "outputs" / "runs"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["stages"]["student"]["optim"]["lr"] == 3e-3
    assert config["stages"]["student"]["method"]["weights"]["ce"] == pytest.approx(0.3)
    versions = json.loads((folder / "environment.json").read_text())
    assert {"python", "packages", "commit"} <= versions.keys()
    assert versions["packages"]["torch"]
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    terms = {"loss/ce", "loss/kd", "loss/intermediate", "intermediate/alpha_entropy_1", "loss"}
    assert any(terms <= point.keys() for point in points)
    assert {"teacher/validation/accuracy", "validation/accuracy"} <= {key for point in points for key in point}

    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "done"
    assert (result["task"], result["method"], result["seed"], result["teacher"]) == ("tiny_task0", "alp", 42, "tiny")
    assert (result["metric"], result["score"]) == ("accuracy", result["metrics"]["accuracy"])
    assert 1 <= result["best_epoch"] <= result["epochs"] == 2
    assert 0 <= result["teacher_score"] <= 1
    assert (result["student"]["num_layers"], result["student"]["width"]) == (2, 32)
    assert result["student"]["init"] == "group_top of finetuned"
    assert result["published"] is None
    assert re.fullmatch("[0-9a-f]{16}", result["key"])
    for key in ("num_params", "examples_per_second", "seconds"):
        assert result[key] > 0
    assert any("T^2" in assumption for assumption in result["assumptions"])
    assert f"alp all on tiny_task0, seed 42: {100 * result['score']:.2f} accuracy" in alp.out
    assert f"{100 * result['teacher_score']:.2f}" in alp.out


def test_the_student_is_a_hugging_face_folder(alp: Ended, tiny_task_folder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = run_folder(alp) / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in folder.iterdir()
    }
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with (tiny_task_folder / "validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
    encoded = tokenizer(*texts, truncation=True, max_length=48, padding=True, return_tensors="pt")
    with torch.inference_mode():
        outputs = model.eval()(**encoded).logits.argmax(-1).tolist()
    right = [model.config.id2label[output] == row["label"] for output, row in zip(outputs, rows, strict=True)]
    result = result_of(alp)
    assert sum(right) / len(right) == pytest.approx(result["score"])
    assert sum(p.numel() for p in model.parameters()) == result["num_params"]
    assert f"{100 * result['score']:.2f}" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_a_plan_tells_time_and_disk_and_waits_for_no_gpu(
    workplace: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    from_name = Device.from_name

    def on_the_cpu(name: str, *rest: Any) -> Any:
        asked.append(name)
        return from_name("cpu", *rest)

    monkeypatch.setattr(Device, "from_name", on_the_cpu)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    given = [value for value in inputs if not value.startswith("runtime.device")]
    planned = distill_run(workplace, *given, "method=pkd", "seed=11", "plan=true", "runtime.device=auto")
    assert re.search(r"time: \d+ s \(.*student \d+ s\).*; disk: 0.0 GB needed, \d+ GB free", planned.err), planned.err
    assert set(asked) == {"cuda:0"}  # which is taken without a place in the queue


def test_the_same_command_again_is_a_hit_and_neither_it_nor_a_reader_takes_a_device(
    alp: Ended, workplace: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise AssertionError("waits for a free GPU")

    monkeypatch.setattr(Device, "from_name", taken)
    monkeypatch.chdir(workplace)
    before = result_of(alp)
    again = distill_run(workplace, *inputs, "method=alp")
    assert (again.out, result_of(again)) == (alp.out, before)
    hit, *account = again.err.splitlines()
    assert hit.split()[:2] == ["hit", "student"]
    assert account == [line for line in alp.err.splitlines() if line.startswith(ACCOUNT)]
    with ExitStack() as stack:
        run = FinishedRun.read(run_folder(alp), stack)
        assert len(run.tokens) == 40
        assert run.pipeline.store.delete(run.pipeline.store.path(run.stage.spec)) == IN_USE
    with pytest.raises(AssertionError, match="free GPU"):
        distill_run(workplace, *inputs, "method=pkd", "seed=9")


def test_a_teacher_that_was_deleted_is_not_trained_to_be_reported(
    alp: Ended, workplace: Path, inputs: tuple[str, ...], tmp_path: Path
) -> None:
    copy = shutil.copytree(workplace, tmp_path / "copy")
    for folder in copy.glob("outputs/store/stage/*/"):
        if json.loads((folder / "spec.json").read_text())["stage"] == "teacher":
            shutil.rmtree(folder)
    again = distill_run(copy, *inputs, "method=alp")
    hit, *account = again.err.splitlines()
    assert hit.split()[:2] == ["hit", "student"]
    assert account == [line for line in alp.err.splitlines() if line.startswith(ACCOUNT)]
    first = result_of(alp)
    for row in first["by_class"]["validation"].values():
        del row["teacher_recall"]
    assert result_of(again) == {**first, "teacher_score": None, "data_match": None} | {
        key: result_of(again)[key] for key in ("folder", "model")
    }
    assert [line for line in alp.out.splitlines() if "  teacher  " not in line][:-1] == again.out.splitlines()[:-1]


@pytest.mark.slow
def test_a_sweep_goes_on_behind_a_point_that_fails(alp: Ended, workplace: Path, inputs: tuple[str, ...]) -> None:
    ended = distill_run(workplace, *inputs, "-m", "method=pkd,nkd", "mapping=all", "optim.clip=null")
    assert ended.code == 1
    assert "this method compares student layer 1 with one teacher layer, not with 4" in ended.err
    assert "Traceback" not in ended.err
    assert re.search(r"^nkd +\d+\.\d\d$", ended.out, re.MULTILINE)
    assert re.search(r"^pkd .*failed", ended.out, re.MULTILINE)


def test_a_sweep_with_an_unknown_choice_does_not_begin(workplace: Path, inputs: tuple[str, ...]) -> None:
    ended = distill_run(workplace, *inputs, "-m", "seed=1", "method=nkd,pdk")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("method=pdk: there is no such choice\n  Did you mean 'pd'?")


# Ending otherwise.


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path, inputs: tuple[str, ...]) -> None:
    wild = ("optim.lr=1e30", "optim.clip=null", "optim.warmup=0")
    ended = distill_run(tmp_path, *inputs, "method=nkd", *wild)
    assert ended.code == 1
    *_, problem, remedy = ended.err.splitlines()
    assert re.fullmatch(r"step \d+: loss/ce is (nan|inf)", problem)
    assert "optim.lr" in remedy
    assert "Traceback" not in ended.err
    (status,) = tmp_path.glob("outputs/runs/*/status.json")
    failed = json.loads(status.read_text())
    assert failed["status"] == "failed"
    assert problem in failed["error"]


def test_an_interrupted_run_says_so(workplace: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from distill_runner import running

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running._Run, "_build_with_tracker", interrupted)
    ended = distill_run(workplace, *inputs, "method=nkd", "seed=77")
    assert ended.code == 130
    assert ended.err.endswith("interrupted: repeat the command to resume\n")
    told = [json.loads(file.read_text()) for file in workplace.glob("outputs/runs/*/status.json")]
    assert [found["error"] for found in told if found["status"] == "interrupted"] == [None]


def test_a_paused_run_tells_how_to_go_on(workplace: Path, inputs: tuple[str, ...]) -> None:
    arguments = (*inputs, "method=nkd", "seed=78", "optim.epochs=2")
    paused = distill_run(workplace, *arguments, "runtime.pause_after=1")
    assert paused.code == 0
    assert paused.err.endswith("paused after epoch 1: the same command without runtime.pause_after resumes\n")
    told = [json.loads(file.read_text()) for file in workplace.glob("outputs/runs/*/status.json")]
    assert [len(found["history"]) for found in told if found["status"] == "paused"] == [1]
    resumed = distill_run(workplace, *arguments)
    assert "resuming after step" in resumed.err
    assert result_of(resumed)["epochs"] == 2


def test_a_fault_of_the_program_shows_its_traceback(
    workplace: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill_runner import running

    def faulty(*_: Any) -> None:
        raise OSError("not foreseen")

    monkeypatch.setattr(running, "run_stage", faulty)
    with pytest.raises(OSError, match="not foreseen"):
        distill_run(workplace, *inputs)


def test_a_full_gpu_is_told_with_what_helps(
    tmp_path: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")

    monkeypatch.setattr("distill_runner.running._Run._build_with_tracker", allocate)
    ended = distill_run(tmp_path, *inputs, "method=nkd", "seed=79")
    assert ended.code == 1
    *_, problem, remedy = ended.err.splitlines()
    assert problem == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert all(name in remedy for name in ("batch_size", "accumulation", "gradient_checkpointing", "workers_per_gpu"))
    (status,) = tmp_path.glob("outputs/runs/*/status.json")
    assert json.loads(status.read_text())["status"] == "failed"


def test_an_interrupt_that_a_library_replaces_stays_one() -> None:
    """torch's device context fails to end where ``from_pretrained`` is interrupted in it."""

    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AssertionError("trying to pop from empty mode stack")

    with pytest.raises(KeyboardInterrupt), run_errors():
        interrupted()


# Bad inputs, as tests/faults/bad_inputs.md lists them.


@pytest.fixture(scope="module")
def faulty_folders(tmp_path_factory: pytest.TempPathFactory, tiny_task_folder: Path, tiny_bert_folder: Path) -> Path:
    """A folder with data and a model that are whole, and copies of them with one fault each."""
    place = tmp_path_factory.mktemp("bad")

    def copy(source: Path, name: str) -> Path:
        return Path(shutil.copytree(source, place / name))

    copy(tiny_task_folder, "data")
    copy(tiny_bert_folder, "model")
    (place / "empty").mkdir()
    (place / "a_file").write_text("")
    (copy(tiny_task_folder, "one_split") / "validation.csv").unlink()
    other = copy(tiny_task_folder, "other_labels") / "validation.csv"
    other.write_text(other.read_text().replace("yes", "perhaps"))
    _damage_parquet(place)
    _write_odd_tables(place)
    (copy(tiny_bert_folder, "no_weights") / "model.safetensors").unlink()
    for file in copy(tiny_bert_folder, "no_tokenizer").glob("*token*"):
        file.unlink()
    (place / "no_tokenizer" / "vocab.txt").unlink(missing_ok=True)
    weights = copy(tiny_bert_folder, "truncated_weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _other_models(place)
    return place


def _damage_parquet(place: Path) -> None:
    import pandas

    frame = pandas.read_csv(place / "data" / "train.csv")
    for name in ("truncated", "corrupt"):
        (place / name).mkdir()
        frame.to_parquet(place / name / "train.parquet")
        frame.to_parquet(place / name / "validation.parquet")
    train, validation = place / "truncated" / "train.parquet", place / "corrupt" / "validation.parquet"
    train.write_bytes(train.read_bytes()[:-100])
    validation.write_bytes(b"PAR1" + bytes(200) + b"PAR1")


def _write_odd_tables(place: Path) -> None:
    rows = [("title", "body", "label"), *((f"caf\u00e9 {n}", f"words {n}", ("no", "yes")[n % 2]) for n in range(20))]
    text = "".join(f"{','.join(row)}\n" for row in rows)
    contents = {
        "two_texts": text.encode(),
        "windows": text.encode("cp1252"),
        "unpaired": text.replace("words 4", '"words 4').replace("words 11", 'words 11"').encode(),
        "ragged": text.replace("words 4", "words, 4").encode(),
        "empty_texts": re.sub("(caf\u00e9|words) \\d+", "", text).encode(),
        "identifiers": re.sub(r"(\d+),(no|yes)", r"\1,id\1", text).encode(),
    }
    for name, content in contents.items():
        (place / name).mkdir()
        for split in ("train", "validation"):
            (place / name / f"{split}.csv").write_bytes(content)
    shutil.copytree(place / "data", place / "two_files")
    (place / "two_files" / "train.jsonl").write_text("{}")


def _other_models(place: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertModel

    from distill_runner.datasets.pretraining import train_wordpiece

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for name, labels in (("nameless_head", ["LABEL_0", "LABEL_1"]), ("other_head", ["no", "perhaps", "yes"])):
        config = AutoConfig.from_pretrained(place / "model", id2label=dict(enumerate(labels)), num_labels=len(labels))
        AutoModelForSequenceClassification.from_config(config).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), id2label={0: "no", 1: "yes"})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(place / "decoder")
    tokenizer.save_pretrained(place / "decoder")
    for name, width in (("narrow", 16), ("other_words", 32)):
        config = AutoConfig.from_pretrained(place / "model", hidden_size=width, num_hidden_layers=2)
        BertModel(config).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    train_wordpiece(["quite other words"], 160, place / "other_words")
    shutil.copytree(place / "model", place / "added_token")
    tokenizer.add_tokens(["<entity>"])
    tokenizer.save_pretrained(place / "added_token")


def _table() -> Iterator[tuple[int, str, str]]:
    """Line number, input and what is printed, of every row."""
    for number, line in enumerate(TABLE.read_text().splitlines()):
        if row := re.fullmatch(r"\| `(.+?)` \| `(.*)` \|", line):
            yield number, row[1], row[2].replace("`<br>`", "\n  ")


def _sample() -> Iterator[Any]:
    """All rows; the first two of each table are run by default, the rest with the slow tests."""
    previous, position = -1, 0
    for number, typed, printed in _table():
        position = position + 1 if number == previous + 1 else 0
        previous = number
        marks = [pytest.mark.slow] if position >= 2 else []
        yield pytest.param(typed, printed, id=typed, marks=marks)


@pytest.mark.parametrize(("typed", "printed"), list(_sample()))
def test_a_bad_input_is_told_in_two_lines(
    faulty_folders: Path, typed: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    base = "task=custom task.dataset=data task.columns=[sentence1,sentence2] task.max_length=48"
    base += " teacher=base teacher.source=model student.num_layers=2"
    arguments = [*base.split(), *shlex.split(typed), *["method=alp"] * ("method=" not in typed)]
    ended = distill_run(faulty_folders, *arguments)
    lines = [
        line
        for line in ended.err.splitlines()
        if not re.match("(build|hit|stage|recipe|assumption|assumptions) ", line) and not line.startswith(ACCOUNT)
    ]
    if os.environ.get("UPDATE_BAD_INPUTS"):
        _rewrite(typed, lines)
    else:
        assert "\n".join(lines) == printed
    assert (ended.code, ended.out) == (2, "")
    assert 1 <= len(lines) <= 2
    legible = [part for part in arguments if f"{part}: cannot be read" not in ended.error]  # others are typed anew
    check_offers(lambda *offer: distill_run(faulty_folders, *legible, *offer, "plan=true"), ended)
    assert not list(faulty_folders.glob("outputs/store/stage/*/model")), "something was trained"


def _rewrite(typed: str, lines: list[str]) -> None:
    printed = "`<br>`".join(line.strip() for line in lines)
    content = TABLE.read_text().splitlines()
    (number,) = (number for number, known, _ in _table() if known == typed)
    content[number] = f"| `{typed}` | `{printed}` |"
    TABLE.write_text("\n".join(content) + "\n")


def test_the_whole_error_is_shown_on_demand(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError, match=r"^optim\.lr=abc: must be a number$"):
        distill_run(workplace, "optim.lr=abc")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.parametrize("key", ["teacher.source", "student.init.source", "task.dataset"])
def test_an_unreachable_hub_is_told_at_once(
    workplace: Path, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(workplace / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(workplace / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.RESOLVED.clear()
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    ended = distill_run(workplace, *inputs, f"{key}=nobody/nothing")
    hub.RESOLVED.clear()
    assert ended.code == 1
    assert f"{key}=nobody/nothing: " in ended.err
    assert "the hub cannot be reached (ConnectError" in ended.err
    assert "Retrying" not in ended.err
    assert sum(waited) < 5, "the libraries alone would wait for half a minute between their tries"


def test_a_bare_command_is_the_help_and_the_version_is_ours(tmp_path: Path) -> None:
    from importlib.metadata import version

    assert distill_run(tmp_path).out == distill_run(tmp_path, "--help").out
    assert distill_run(tmp_path, "--version").out == f"distill-run {version('distill-run')}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["train[:90%]", "validation[9503:]", "train[~10%:20%]", "owner/name:config:train[:5]"])
def test_parts_of_splits_need_no_quotes(part: str) -> None:
    for options in ([], ["-m"]):
        assert hydra_arguments([f"task.train={part}", *options]) == [f"task.train='{part}'", *options]
        assert OverridesParser.create().parse_override(f"task.train='{part}'").value() == part


@pytest.mark.parametrize("value", ["a,b", "a", "[a,b]"])
@pytest.mark.parametrize("key", ["task.columns", "task.metrics", "task.probabilities"])
def test_lists_need_no_brackets(key: str, value: str) -> None:
    assert hydra_arguments([f"{key}={value}"]) == [f"{key}=[{value.strip('[]')}]"]
    assert hydra_arguments([f"{key}=null"]) == [f"{key}=null"]
