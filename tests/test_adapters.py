"""Adapters of PEFT: merged into their base by ``peft``, or refused; never left out."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import ModelSource, resolve_source
from distill_runner.models.weights import read_report
from helpers.classifiers import HEAD, SIZES
from helpers.command import distill_run
from helpers.lora import has_peft, merged_query, peft, save_adapter

QUERY = "bert.encoder.layer.{}.attention.self.query.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    BertForPreTraining(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def with_peft() -> Iterator[None]:
    with peft():
        yield


def adapter(folder: Path, base: Path | str, outputs: int = 0, **settings: Any) -> Path:
    return save_adapter(folder, base, SIZES["num_hidden_layers"], SIZES["hidden_size"], outputs, **settings)


def built(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = build(ModelConfig(source=str(folder), **options), HEAD).state_dict()
    return state


@pytest.mark.parametrize("outputs", [0, 2], ids=["backbone", "classifier"])
def test_an_adapter_is_merged_into_its_base(base: Path, tmp_path: Path, with_peft: None, outputs: int) -> None:
    """The base would be trained without the adapter that the user means."""
    folder = adapter(tmp_path / "adapter", base, outputs)
    weights, state = load_file(base / "model.safetensors"), built(folder)
    for layer in range(SIZES["num_hidden_layers"]):
        expected = merged_query(weights[QUERY.format(layer)], folder, layer)
        torch.testing.assert_close(state[QUERY.format(layer)], expected)
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(state[name], weights[name])
    if outputs:
        kept = built(folder, head="keep", labels=["no", "yes"])
        head = load_file(folder / "adapter_model.safetensors")["base_model.model.classifier.weight"]
        assert torch.equal(kept["classifier.weight"], head)
        torch.testing.assert_close(kept[QUERY.format(0)], state[QUERY.format(0)])
    report = read_report(resolve_source(str(folder)), ModelConfig(source=str(folder)), HEAD)
    assert report is not None
    assert not report.fails


def test_base_and_adapter_are_both_in_the_fingerprint(base: Path, tmp_path: Path, with_peft: None) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    folder = adapter(tmp_path / "adapter", own)
    prints = [resolve_source(str(folder)).fingerprint, resolve_source(str(own)).fingerprint]
    for changed, name in ((folder, "adapter_model.safetensors"), (own, "model.safetensors")):
        tensors = load_file(changed / name)
        tensors[next(iter(tensors))].add_(1)
        save_file(tensors, changed / name, {"format": "pt"})
        (folder / "adapter_config.json").touch()
        prints.append(resolve_source(str(folder)).fingerprint)
    assert len(set(prints)) == 4


def break_base(folder: Path, base: Path) -> None:
    settings = json.loads((folder / "adapter_config.json").read_text())
    other = folder.parent / "other"
    BertForMaskedLM(BertConfig(**SIZES | {"num_hidden_layers": 2})).save_pretrained(other)
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(other)}))


def name_no_base(folder: Path, base: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": null}')


def damage(folder: Path, base: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def remove_weights(folder: Path, base: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def put_beside(folder: Path, base: Path) -> None:
    shutil.copytree(base, folder, dirs_exist_ok=True)


def name_itself(folder: Path, base: Path) -> None:
    adapter(folder, adapter(folder.parent / "first", base))


WRONG = {
    "another base": (break_base, r"2 of the 6 tensors of its adapter fit nothing in other"),
    "no base": (name_no_base, r"its base '': names no model\n  Name it in adapter_config"),
    "damaged": (damage, "adapter_config.json is damaged or"),
    "no weights": (remove_weights, "holds no weights of its adapter"),
    "beside a model": (put_beside, r"the weights of a model \(model.safetensors\): either could be meant"),
    "of an adapter": (name_itself, "is an adapter too"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_refused(base: Path, tmp_path: Path, with_peft: None, case: str) -> None:
    change, words = WRONG[case]
    folder = adapter(tmp_path / "adapter", base)
    change(folder, base)
    with pytest.raises(UserError, match=words) as caught:
        built(folder)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_weights_beside_an_adapter_count_before_they_are_downloaded(
    base: Path, tmp_path: Path, with_peft: None, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder = adapter(tmp_path / "adapter", base)
    names = [path.name for path in folder.iterdir()]
    monkeypatch.setattr(hub, "download", lambda *_: folder)
    monkeypatch.setattr(hub, "listed_files", lambda _: [SimpleNamespace(path=name) for name in (*names, file)])
    commit = hub.Commit("model", "acme/both", "0" * 40)
    with pytest.raises(UserError, match=f"the weights of a model \\({file}\\): either could be meant"):
        _ = ModelSource("acme/both", folder, commit).base
    assert ModelSource("here", folder).base == resolve_source(str(base))


def test_a_merged_model_leaves_no_files(
    base: Path, tmp_path: Path, with_peft: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends at once, as those of torchrun do, would leave a copy of the model each time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    built(adapter(tmp_path / "adapter", base))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.skipif(has_peft(), reason="peft is installed")
def test_an_adapter_is_refused_where_peft_is_not_installed(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    for action in (resolve_source(str(folder)).require_weights, lambda: built(folder)):
        with pytest.raises(UserError, match=r"read only where peft is installed\n.*pip install peft, or merge it"):
            action()


def test_a_run_starts_from_an_adapter(
    tiny_bert_folder: Path, tiny_task_folder: Path, tmp_path: Path, with_peft: None
) -> None:
    config = json.loads((tiny_bert_folder / "config.json").read_text())
    folder = save_adapter(tmp_path / "adapter", tiny_bert_folder, config["num_hidden_layers"], config["hidden_size"])
    own = (
        "task=custom",
        f"task.dataset={tiny_task_folder}",
        "task.columns=[sentence1,sentence2]",
        "task.max_length=48",
    )
    ended = distill_run(
        tmp_path, *own, "teacher=base", f"teacher.source={folder}", "runtime.device=cpu", "method=rkd", "plan=true"
    )
    assert ended.code == 0, ended.err
    assert f"weights  teacher {folder} merged into {tiny_bert_folder}: " in ended.err
