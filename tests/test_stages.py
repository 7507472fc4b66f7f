"""What determines a stage, what it needs, and that nothing else has a say in what it yields."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, LongformerConfig, LongformerModel

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.pretraining import train_wordpiece
from distill_runner.methods.config import parse_method
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import read_config, read_shape, with_padding
from distill_runner.pipeline.planning import plan
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from helpers.built_runs import Run, student

Compose = Callable[..., RunConfig]
CE = {"term": "hard_labels"}


@pytest.fixture(scope="module")
def stage(compose: Compose) -> Callable[..., Stage]:
    """The student's stage of a run; by default learning by alp."""
    return lambda *overrides: student(compose("method=alp", *overrides))


@pytest.fixture(scope="module")
def alp(stage: Callable[..., Stage]) -> Stage:
    return stage()


# What determines a stage.


def test_where_and_how_a_run_computes_is_no_part_of_it(stage: Callable[..., Stage], alp: Stage) -> None:
    elsewhere = stage(
        "runtime.device=cuda",
        "runtime.targets=live",
        "runtime.threads=1",
        "runtime.log_every=3",
        "runtime.checkpoint_minutes=1",
        "tracker=tensorboard",
        "task.name=renamed",
        "teacher.name=renamed",
    )
    assert elsewhere.key == alp.key
    assert elsewhere.teacher is not None
    assert alp.teacher is not None
    assert elsewhere.teacher.key == alp.teacher.key


@pytest.mark.parametrize(
    "override",
    [
        "runtime.precision=bf16",
        "seed=1",
        "loss.eta=0.4",
        "loss.temperature=3.0",
        "mapping=skip",
        "attention=kqv1",
        "method=ckd",
        "optim.lr=1e-4",
        "optim.epochs=3",
        "optim.max_steps=3",
        "stages.student.select=last",
        "student.num_layers=3",
        "student.init.layers=random",
        "student.init.source=finetuned",
        "task.max_length=32",
        "task.version=2",
        "teacher.seed=1",
        "teacher.optim.lr=1e-4",
        "stages.student.teacher_outputs=float16",
    ],
)
def test_all_that_has_a_say_is_part_of_it(stage: Callable[..., Stage], alp: Stage, override: str) -> None:
    changed = stage(override)
    assert changed.key != alp.key
    assert changed.teacher is not None
    assert alp.teacher is not None
    shared = not override.startswith(("teacher", "task", "runtime"))
    assert (changed.teacher.key == alp.teacher.key) == shared


def test_what_no_term_reads_is_no_part_of_it(compose: Compose, tiny_bert_folder: Path) -> None:
    own = f"student.init.source={tiny_bert_folder}"
    nkd = student(compose("method=nkd", own))
    assert nkd.teacher is None
    assert nkd.upstream == []
    others = ("teacher.seed=1", "teacher.optim.lr=1e-4", "loss.temperature=3.0", "mapping=skip", "attention=kqv1")
    assert student(compose("method=nkd", own, *others)).key == nkd.key
    # Not even one that could not be had.
    assert student(compose("method=nkd", own, "teacher.source=/no/such/folder")).key == nkd.key
    without = student(compose("method=rkd", own, "loss.eta=0.0"))
    assert without.key == nkd.key
    assert without.teacher is None
    assert student(compose("method=rkd", own, "loss.eta=0.1")).key != nkd.key


def test_methods_and_seeds_share_one_teacher(compose: Compose) -> None:
    resolved = [student(compose(f"method={method}")) for method in ("rkd", "pkd", "ckd", "alp")]
    resolved += [student(compose("method=rkd", "seed=7", "student.num_layers=1"))]
    assert len({stage.key for stage in resolved}) == 5
    assert len({stage.teacher.key for stage in resolved if stage.teacher}) == 1
    specs = [stage.teacher.spec for stage in resolved if stage.teacher]
    assert all(spec == specs[0] for spec in specs)


def test_data_count_by_content_wherever_they_lie(
    stage: Callable[..., Stage], alp: Stage, tiny_task_folder: Path, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    folders = (tiny_task_folder, tiny_bert_folder)
    task, model = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders)
    moved = (f"task.dataset={task}", f"teacher.source={model}")
    assert stage(*moved).key == alp.key
    with (task / "validation.csv").open("a") as file:
        file.write("one,more,yes\n")
    assert stage(*moved).key != alp.key


# What a stage needs.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.student.model.source=stage:student"], r"stages=student -> student: a stage depends on itself"),
        (
            ["student.init.source=finetuned", "stages.teacher.model.source=stage:student"],
            r"stages=student -> teacher -> student: a stage depends on itself",
        ),
        (["stages.student.teacher=teecher"], r"teacher=teecher: there is no such stage\n.*Did you mean 'teacher'"),
        (["stages.student.teacher=null"], r"teacher: this method needs a teacher, but the stage has none"),
        (["student.num_layers=5"], r"num_layers=5: must be between 1 and 4"),
        (["student.init.source=finetuned", "student.num_layers=5"], r"num_layers=5: must be between 1 and 4, the"),
        (["student.num_layers=1"], r"supervises no layer of a 1-layer student"),
        (["teacher.source=/no/such/folder"], r"there is no such folder"),
        (
            ["+stages.student.model.head=keep"],
            r"model.num_layers=2: a model that keeps its head must keep all its layers",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    stage: Callable[..., Stage], overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stage(*overrides)


def test_a_student_reads_the_words_of_its_teacher(
    stage: Callable[..., Stage], tiny_bert_folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_bert_folder, tmp_path / "other"))
    train_wordpiece(["quite other words"], 160, other)
    with pytest.raises(UserError, match="its tokenizer is not that of the teacher"):
        stage("method=internal", f"student.init.source={other}")
    own = stage("method=rkd", f"student.init.source={other}")  # which reads predictions alone
    names = [getattr(each and each.tokenizer, "name", None) for each in (own, own.teacher)]
    assert names == [str(other), str(tiny_bert_folder)]


@pytest.fixture
def without_segments(tiny_bert_folder: Path, tmp_path: Path) -> Path:
    """The tiny BERT with a tokenizer that gives no segments, and whose padding token is not the first token."""
    folder = Path(shutil.copytree(tiny_bert_folder, tmp_path / "without_segments"))
    file = folder / "tokenizer_config.json"
    own = {"model_input_names": ["input_ids", "attention_mask"], "pad_token": "[MASK]"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return folder


def test_a_new_model_pads_with_the_token_of_its_tokenizer(
    stage: Callable[..., Stage], without_segments: Path, tiny_bert_folder: Path
) -> None:
    new = ("method=nkd", "student=fresh", "student.layers=2", "student.width=32", "student.heads=2")
    padding = AutoTokenizer.from_pretrained(without_segments).pad_token_id
    made = stage(*new, f"student.tokenizer={without_segments}")
    model = build(made.config.model, made.head, 200)
    embeddings = model.get_input_embeddings()
    assert model.config.pad_token_id == embeddings.padding_idx == padding != 0
    assert torch.as_tensor(embeddings.weight)[0].abs().sum() > 0
    for given, expected in (
        ([f"student.tokenizer={without_segments}", "stages.student.model.architecture.pad_token_id=3"], 3),
        ([f"student.tokenizer={tiny_bert_folder}"], None),
    ):
        assert (stage(*new, *given).config.model.architecture or {}).get("pad_token_id") == expected


@pytest.mark.parametrize("padding", [0, 3, 787])
@pytest.mark.parametrize("family", ["bert", "roberta", "longformer", "mpnet", "modernbert"])
def test_a_new_model_reads_as_many_tokens_whatever_its_padding_token(family: str, padding: int) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    window = {"attention_window": [4]} if family == "longformer" else {}
    architecture = {"model_type": family, "vocab_size": 800, "max_position_embeddings": 80, **sizes, **window}
    given = ModelConfig(architecture=architecture)
    model = with_padding(given, "tokenizer", padding)
    shape = read_shape(model)
    assert shape.max_length == read_shape(given).max_length
    built = AutoModel.from_config(read_config(model))
    assert built.get_input_embeddings().padding_idx == (1 if family == "mpnet" else padding)
    ids = torch.full((1, shape.max_length), 5)
    assert built(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule=pid", "optim.epochs=2", "optim.max_steps=2"], "ends the training in epoch 1, but schedule=pid"),
        (["schedule=pid", "optim.epochs=2"], None),
        (["schedule=pid", "optim.epochs=0", "optim.max_steps=2"], None),
    ],
)
def test_a_training_cut_by_steps_has_the_epochs_of_its_schedule(
    compose: Compose, overrides: list[str], message: str | None
) -> None:
    run = Run(compose("method=internal", *overrides))
    if message is None:
        run.pipeline.prepare(run.stage)
        return
    with pytest.raises(UserError, match=rf"stages.student.optim.max_steps=2: {message}"):
        run.pipeline.prepare(run.stage)
    assert not run.trained


def test_a_family_that_cannot_be_cut_is_refused_before_training(compose: Compose, tiny_bert_folder: Path) -> None:
    source = tiny_bert_folder.with_name("longformer")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 80,
    }
    config = LongformerConfig(num_hidden_layers=4, attention_window=[4] * 4, vocab_size=200, **sizes)
    LongformerModel(config).save_pretrained(source)
    AutoTokenizer.from_pretrained(tiny_bert_folder).save_pretrained(source)
    run = Run(compose("method=nkd", f"student.init.source={source}"))
    with pytest.raises(UserError, match=r"student.model.num_layers=2: a model of type longformer cannot be cut"):
        run.pipeline.prepare(run.stage)


def test_a_vocabulary_of_the_run_is_not_that_of_a_model_from_elsewhere(
    compose: Compose, tiny_bert_folder: Path
) -> None:
    with pytest.raises(UserError, match="only one uses the vocabulary trained on the run's corpus"):
        student(compose("experiment=demo_methods", "method=rkd", f"student.init.source={tiny_bert_folder}", tiny=False))


@pytest.mark.parametrize(
    ("terms", "weights", "message"),
    [
        ({"ce": {"term": "hard_label"}}, {"ce": 1}, "there is no such term\n  Did you mean 'hard_labels'?"),
        ({"ce": {"term": "distill_runner.methods.base.Lossterm"}}, {"ce": 1}, "has no class Lossterm"),
        ({"ce": {"term": "no_such_module.LossTerm"}}, {"ce": 1}, "there is no module no_such_module"),
        ({"ce": {"term": "distill_runner.methods.base.Method"}}, {"ce": 1}, "is not a LossTerm"),
        ({"ce": {"term": "distill_runner.methods.base.LossTerm"}}, {"ce": 1}, "is abstract"),
        ({"ce": "os.system"}, {"ce": 1}, "terms.ce=os.system: must be a mapping"),
        (None, {"ce": 1}, "method.terms=null: must be a mapping"),
        ({"ce": CE}, None, "method.weights=null: must be a mapping"),
        ({"ce": CE | {"temperature": 3}}, {"ce": 1}, "terms.ce.temperature: there is no such key"),
        ({"ce": CE}, {"ce": 1, "kd": 1}, "must name the terms ce"),
        ({"ce": CE}, {"ce": "much"}, "must be a number"),
        ({"ce": CE}, {"ce": -1}, "must not be negative"),
    ],
)
def test_methods_that_cannot_be_built_are_refused(terms: dict[str, Any], weights: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method({"terms": terms, "weights": weights}).make()


def test_what_is_trained_learns_something(compose: Compose) -> None:
    weights = ("loss.eta=0", "stages.student.method.weights.ce=0", "stages.student.method.weights.kd=0")
    with pytest.raises(UserError, match="every term has weight 0"):
        student(compose("method=rkd", *weights))
    assert student(compose("method=rkd", *weights, "optim.epochs=0")).teacher is None


# What a stage yields.


CKD = ("method=ckd", "student.num_layers=3", "seed=5")  # parameters of its own, and dropout


@pytest.fixture(scope="module")
def reference(compose: Compose) -> Run:
    """A student by CKD from an empty store."""
    run = Run(compose(*CKD))
    run.build()
    return run


@pytest.fixture
def used(compose: Compose, reference: Run, tmp_path: Path) -> Run:
    """The same run on a copy of the store that it has filled."""
    return Run(compose(*CKD, f"store.dir={shutil.copytree(reference.store.folder, tmp_path / 'store')}"))


def damage(file: Path) -> None:
    """One bit, which no look at sizes would find."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def targets(run: Run) -> Path:
    (folder,) = (path.parent for path in run.store.folder.glob("targets/*/manifest.json"))
    return folder


@pytest.mark.parametrize("keeps", [False, True])
def test_a_training_that_is_complete_is_not_repeated(
    keeps: bool, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption between the last file of a stage and the checksums of all files."""
    run = Run(compose("method=nkd", f"stages.student.keep_checkpoints={keeps}", f"store.dir={tmp_path}"))
    with monkeypatch.context() as here:
        here.setattr("distill_runner.pipeline.store._write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.build()
    assert run.trained == ["student"]
    files = run.build()
    assert run.trained == ["student"]
    assert files == Run(compose("method=nkd")).build()


def interrupted(folder: Path) -> None:
    if (folder / "metrics.json").exists() or (folder / "stage").exists():
        raise KeyboardInterrupt
    (folder / "manifest.json").write_text("{}")


def test_what_was_there_before_does_not_show_in_the_student(compose: Compose, reference: Run, used: Run) -> None:
    assert reference.trained == ["teacher", "student"]
    assert used.build() == reference.build()
    assert used.trained == []
    # Everything but the student: its teacher, tokens and targets are found.
    shutil.rmtree(used.store.path(used.stage.spec))
    assert used.build() == reference.build()
    assert used.trained == ["student"]
    # The teacher alone, and of another method's run.
    other = Run(compose("method=rkd", "student.num_layers=1", "seed=6"))
    other.build()
    run = Run(compose(*CKD, f"store.dir={other.store.folder}"))
    assert run.build() == reference.build()
    assert run.trained == ["student"]


def test_cached_and_live_targets_give_the_same_student(compose: Compose, reference: Run) -> None:
    live = Run(compose(*CKD, "runtime.targets=live"))
    assert live.build() == reference.build()
    assert not (live.store.folder / "targets").exists()
    assert {file.name for file in targets(reference).glob("*.npy")} == {"logits.npy", "cls.npy"}


def test_outputs_in_float16_make_another_student_cached_or_live(compose: Compose, reference: Run) -> None:
    halves = [Run(compose(*CKD, "teacher.outputs=float16", *more)) for more in ((), ("runtime.targets=live",))]
    first, second = (run.build() for run in halves)
    assert first == second != reference.build()
    cache = targets(halves[0])
    for name in ("logits", "cls"):
        array, exact = np.load(cache / f"{name}.npy"), np.load(targets(reference) / f"{name}.npy")
        assert array.dtype == np.float16
        np.testing.assert_array_equal(array, exact.astype(np.float16))


def test_a_precision_of_outputs_that_are_never_cached_is_no_part_of_it(stage: Callable[..., Stage]) -> None:
    half = "teacher.outputs=float16"
    assert stage(half).key != stage().key
    for method in ("nkd", "distilbert"):
        assert stage(half, f"method={method}").key == stage(f"method={method}").key, method


@pytest.mark.parametrize("part", ["student", "teacher", "targets", "tokens"])
def test_damaged_artifacts_are_built_again(reference: Run, used: Run, part: str) -> None:
    assert used.stage.teacher is not None
    place = {
        "student": used.store.path(used.stage.spec) / "model" / "model.safetensors",
        "teacher": used.store.path(used.stage.teacher.spec) / "model" / "model.safetensors",
        "targets": targets(used) / "cls.npy",
        "tokens": used.store.path(used.stage.split_spec("train")) / "ids.npy",
    }[part]
    whole = place.read_bytes()
    damage(place)
    if part != "student":
        shutil.rmtree(used.store.path(used.stage.spec))
    assert used.build() == reference.build()
    assert place.read_bytes() == whole
    assert used.trained == (["teacher", "student"] if part == "teacher" else ["student"])


def test_a_damaged_student_whose_source_is_gone_is_the_same_again(compose: Compose) -> None:
    run = Run(compose("method=nkd", "student.init.source=finetuned"))
    before = run.build()
    assert run.trained == ["teacher", "student"]
    assert run.stage.source_stage is not None
    # The source is trained again on the way, and must not move the random numbers of the student.
    damage(run.store.path(run.stage.spec) / "model" / "model.safetensors")
    shutil.rmtree(run.store.path(run.stage.source_stage.spec))
    assert run.build() == before
    assert run.trained == ["teacher", "student"] * 2


def test_a_student_may_start_from_the_fine_tuned_teacher(compose: Compose) -> None:
    untrained = ("student.init.source=finetuned", "student.init.layers=group_top", "optim.epochs=0")
    run = Run(compose("method=nkd", *untrained))
    run.build()
    assert run.stage.source_stage is not None
    mine, source = (
        load_file(run.store.path(spec) / "model" / "model.safetensors")
        for spec in (run.stage.spec, run.stage.source_stage.spec)
    )
    for name, tensor in mine.items():
        expected = name.replace("encoder.layer.1.", "encoder.layer.3.").replace("encoder.layer.0.", "encoder.layer.1.")
        assert torch.equal(tensor, source[expected]) != name.startswith("classifier."), name


def test_a_fine_tuned_teacher_is_used_as_it_is(compose: Compose, reference: Run) -> None:
    assert reference.stage.teacher is not None
    trained = reference.store.path(reference.stage.teacher.spec)
    run = Run(compose(*CKD, "teacher.fine_tuned=true", f"teacher.source={trained / 'model'}"))
    assert run.stage.teacher is not None
    run.pipeline.build(run.stage.teacher)
    kept = run.store.path(run.stage.teacher.spec)
    assert (kept / "model" / "model.safetensors").read_bytes() == (trained / "model" / "model.safetensors").read_bytes()
    scores = [json.loads((folder / "metrics.json").read_text())["metrics"] for folder in (kept, trained)]
    assert scores[0] == scores[1]


def test_the_plan_is_what_would_be_built_in_order(compose: Compose, reference: Run, used: Run) -> None:
    fresh = Run(compose(*CKD))
    lines = plan(fresh.stage, fresh.pipeline.store)
    assert [(line.name, line.hit) for line in lines] == [("teacher", False), ("targets", False), ("student", False)]
    assert fresh.trained == []
    assert [(line.name, line.hit) for line in plan(used.stage, used.pipeline.store)] == [("student", True)]
    shutil.rmtree(used.store.path(used.stage.spec))
    again = plan(used.stage, used.pipeline.store)
    assert [(line.name, line.hit) for line in again] == [("teacher", True), ("targets", True), ("student", False)]
    assert str(again[-1]).startswith(f"build student  {reference.stage.key}  tiny_task0: 3 layers x 32 from ")


@pytest.mark.slow
def test_a_chain_from_text_to_student(compose: Compose) -> None:
    """Vocabulary, pre-training, fine-tuning, distillation: the demo, with hardly any training."""
    small = [f"stages.pretrain.model.architecture.{key}" for key in ("hidden_size=16", "num_hidden_layers=3")]
    few = [f"{optim}.max_steps=2" for optim in ("stages.pretrain.optim", "teacher.optim", "optim")]
    sizes = ["corpus.max_length=16", "corpus.vocab_size=300", "task.max_length=16", "student.num_layers=2"]
    run = Run(compose("experiment=demo_methods", "method=pkd", *small, *few, *sizes, tiny=False))
    assert run.stage.tokenizer == "corpus"
    files = run.build()
    assert run.trained == ["pretrain", "teacher", "student"]
    (vocabulary,) = run.store.folder.glob("vocabulary/*/tokenizer.json")
    saved = json.loads(files["model/tokenizer.json"])
    assert saved["model"]["vocab"] == json.loads(vocabulary.read_text())["model"]["vocab"]
    assert run.stage.source_stage is not None
    assert run.stage.teacher is not None
    assert run.stage.teacher.source_stage is not None
    assert run.stage.source_stage.key == run.stage.teacher.source_stage.key


@pytest.mark.parametrize(
    ("given", "stage", "why"),
    [
        (["method=rkd", "optim.patience=1", "stages.student.select=last"], "student", "keeps the last epoch"),
        (["method=rco", "optim.patience=1"], "student", "before the teacher's last checkpoints"),
        (["method=internal", "schedule=pid", "optim.patience=1"], "student", "before the head learns"),
        (["method=annealing", "optim.patience=1"], "phase1", "before the temperature has fallen to 1"),
    ],
)
def test_what_must_not_end_early_is_refused_patience(compose: Compose, given: list[str], stage: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"stages\.{stage}\.optim\.patience=1: .*{why}"):
        compose(*given)


def test_a_tokenizer_of_other_ids_does_not_read_copied_embeddings(
    compose: Compose, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    """Each token would get the embedding of another word, and every tensor would still be read."""
    words = json.loads((tiny_bert_folder / "tokenizer.json").read_text())["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[-2:]
    vocabularies = {
        "same": words,
        "more": words | {"a-new-word": len(words)},
        "turned": words | {first: words[second], second: words[first]},
        "fewer": {token: number for token, number in words.items() if token != second},
    }
    for name, vocabulary in vocabularies.items():
        shutil.copytree(tiny_bert_folder, tmp_path / name)
        content = json.loads((tmp_path / name / "tokenizer.json").read_text())
        content["model"]["vocab"] = vocabulary
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    options = ("method=rkd", "student.num_layers=1")
    for name in ("same", "turned"):
        run = compose(*options, f"student.tokenizer={tmp_path / name}")
        if name == "turned":
            with pytest.raises(UserError, match="gives 2 tokens other ids than"):
                resolve_stage(run.stages, "student", "fp32")
        else:
            assert resolve_stage(run.stages, "student", "fp32")
    sizes = [
        resolve_stage(compose(*options, f"student.tokenizer={tmp_path / name}", resize).stages, "student", "fp32").shape
        for name, resize in (("fewer", "student.resize=false"), ("more", "student.resize=true"))
    ]
    rows = json.loads((tiny_bert_folder / "config.json").read_text())["vocab_size"]
    assert [size.vocab_size for size in sizes] == [rows, max(rows, len(words) + 1)]
