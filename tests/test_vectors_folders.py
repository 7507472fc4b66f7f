"""Folders of sentence-transformers: read and written, with the vectors that their own code computes."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel, T5Config, T5EncoderModel

from distill_runner.common.errors import UserError
from distill_runner.datasets.tokenization import Examples, save_tokenizer
from distill_runner.deploy.folder import ModelFolder
from distill_runner.models.build import build, load_model
from distill_runner.models.config import Head, ModelConfig, VectorOptions
from distill_runner.models.sources import resolve_source
from distill_runner.models.vectors import POOLING_FLAGS, read_sentence_folder
from distill_runner.tasks import make_task
from distill_runner.tasks.vectors.texts import TextRows, write_texts
from distill_runner.training.data import predict
from distill_runner.training.devices import Device
from helpers.sentence_folders import folder_with

TEXTS = ["a b c", "d", "e f g h i j a b", "c c", "j i h g", "a b c d e f g h i j a b c d e f g h i j"]


def own_vectors(folder: Path, scratch: Path, prompt: str = "", **options: Any) -> tuple[Any, np.ndarray]:
    """The model that the program reads from a folder, and its vectors of TEXTS."""
    head = Head("AutoModel", vectors=VectorOptions(prompts={"text": prompt}, max_length=16, **options))
    model = build(ModelConfig(source=str(folder), head="keep"), head)
    scratch.mkdir()
    write_texts(scratch, Examples([TEXTS], None), resolve_source(str(folder)).tokenizer(), 16, [prompt])
    return model, predict(model, TextRows(scratch), Device.from_name("cpu", "fp32"))


def reference(folder: Path, mode: str, skip: int, dense: bool, normalize: bool, prompt: str) -> np.ndarray:
    """Vectors text by text in float64, from the files alone."""
    encoder = BertModel.from_pretrained(folder).double().eval()
    tokenizer = resolve_source(str(folder)).tokenizer()
    rows = []
    for text in TEXTS:
        ids = tokenizer(prompt + text, truncation=True, max_length=16)["input_ids"]
        with torch.no_grad():
            states = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0][skip:]
        vector = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[mode]
        if dense:
            weights = load_file(folder / "2_Dense" / "model.safetensors")
            vector = torch.tanh(weights["linear.weight"].double() @ vector + weights["linear.bias"].double())
        rows.append(vector / vector.norm() if normalize else vector)
    return torch.stack(rows).numpy()


CASES = list(product(["mean", "cls", "lasttoken"], [True, False], [False, True], [True, False]))


def test_a_model_that_leaves_out_its_prompt_is_not_exported(tmp_path: Path) -> None:
    """Padded texts, which ONNX gets, do not say where the prompt ends."""
    from distill_runner.deploy.onnx import export

    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    folder = folder_with(tmp_path / "model", pooling)
    model, _ = own_vectors(folder, tmp_path / "texts", "query: ")
    assert not own_vectors(folder, tmp_path / "plain")[0].skips_prompt
    with pytest.raises(UserError, match=r"include_prompt=false: .* leaves out tokens of the prompt.*\n.*Train with"):
        export(model, {}, tmp_path / "model.onnx")
    with pytest.raises(UserError, match=r"task\.include_prompt=true: a trained model keeps its own modules"):
        ModelFolder.read(str(folder), None, {"include_prompt": True})


@pytest.mark.parametrize(("mode", "include_prompt", "dense", "normalize"), CASES)
def test_vectors_are_those_of_the_modules(
    mode: str, include_prompt: bool, dense: bool, normalize: bool, tmp_path: Path
) -> None:
    prompt, tanh = "query: ", "torch.nn.modules.activation.Tanh"
    pooling = {flag: name == mode for flag, name in POOLING_FLAGS.items()} | {"include_prompt": include_prompt}
    prompts = {"prompts": {"q": prompt}, "default_prompt_name": "q"}
    folder = folder_with(tmp_path / "model", pooling, (5, tanh) if dense else None, normalize, prompts)
    model, vectors = own_vectors(folder, tmp_path / "texts", prompt)
    expected = reference(folder, mode, 0 if include_prompt else 3, dense, normalize, prompt)
    assert vectors == pytest.approx(expected, abs=1e-5)
    model.save_pretrained(tmp_path / "written")
    options = VectorOptions(prompts={"text": prompt}, max_length=16)
    again: Any = load_model(tmp_path / "written", Head("AutoModel", vectors=options))
    assert again.modules_after.layers == model.modules_after.layers or dense
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_the_padded_forward_gives_the_packed_vectors(tmp_path: Path) -> None:
    for mode in ("mean", "cls", "lasttoken"):
        folder = folder_with(tmp_path / mode, {"pooling_mode": mode}, (7, "torch.nn.modules.linear.Identity"))
        model, vectors = own_vectors(folder, tmp_path / f"texts-{mode}")
        tokens = resolve_source(str(folder)).tokenizer()(
            TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt"
        )
        with torch.no_grad():
            padded = model.eval()(**tokens).sentence_embedding.numpy()
        assert padded == pytest.approx(vectors, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, r"pooling cls \+ mean"),
        ({"pooling": {"pooling_mode": "max"}}, "pooling max"),
        ({"dense": (4, "torch.nn.modules.activation.PReLU")}, "dense layer with PReLU"),
        ({"dense": (4, "my_package.ReLU")}, r"dense layer with my_package\.ReLU"),
        ({"prompts": {"similarity_fn_name": "maxsim"}}, "similarity_fn_name=maxsim"),
        ({"prompts": {"prompts": {"q": "a"}, "default_prompt_name": "Q"}}, "default_prompt_name=Q, but no prompt"),
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", **({"pooling": {"pooling_mode": "mean"}} | change))
    with pytest.raises(UserError, match=problem):
        own_vectors(folder, tmp_path / "texts")


def test_encoders_in_subfolders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"})
    entries = json.loads((folder / "modules.json").read_text())
    entries[0] |= {"path": "0_Own", "type": "sentence_transformers.models.Transformer"}
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"in a subfolder, which is not read\n  Save it again"):
        ModelFolder.read(str(folder))


def test_weights_of_dense_layers_are_read_in_either_form_and_checked(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"}, (5, "torch.nn.modules.activation.Tanh"))
    _, vectors = own_vectors(folder, tmp_path / "texts")
    file = folder / "2_Dense" / "model.safetensors"
    pickled, weights = file.with_name("pytorch_model.bin"), load_file(file)
    file.unlink()
    torch.save(weights, pickled)  # of before sentence-transformers 3
    assert np.array_equal(own_vectors(folder, tmp_path / "again")[1], vectors)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('size": 16', 'size": 8'))
    with pytest.raises(UserError, match="a dense layer reads 16 numbers, of which there are 8"):
        ModelFolder.read(str(folder))
    torch.save(weights | {"linear.weight": weights["linear.weight"].T}, pickled)
    with pytest.raises(UserError, match="2_Dense lacks its weights, or has those of other sizes"):
        ModelFolder.read(str(folder))
    pickled.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="its files of sentence-transformers are damaged"):
        ModelFolder.read(str(folder))


def test_modules_run_in_the_order_of_their_list(tmp_path: Path) -> None:
    """As in sentence-transformers: the numbers say nothing, and the last module of a name takes its place."""
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"}, (5, "torch.nn.modules.activation.Tanh"))
    *first, dense, normalize = json.loads((folder / "modules.json").read_text())
    again = {**normalize, "name": dense["name"]}
    for own, kinds in (([dense, normalize], "DN"), ([normalize, dense], "ND"), ([dense, again], "N")):
        (folder / "modules.json").write_text(json.dumps([*first, *own]))
        content: Any = read_sentence_folder(folder, "m")
        assert "".join("N" if layer is None else "D" for layer in content.modules.layers) == kinds


def task_with(**fields: Any) -> Any:
    fields = {"name": "own", "dataset": "d", "epochs": 1, "max_length": 16, "metrics": None} | fields
    return make_task(validation={"validation": "dev"}, **fields)


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("kind", ["embeddings", "retrieval"])
def test_a_task_takes_similarity_and_prompts_of_the_folder_and_students_keep_them(
    kind: str, similarity: Any, tmp_path: Path
) -> None:
    prompts = {"query": "a b: ", "document": "c ", "passage": "d ", "text": "e: "}
    settings = {"prompts": prompts, "default_prompt_name": "text", "similarity_fn_name": similarity}
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"}, prompts=settings)
    source = resolve_source(str(folder))
    own = {"embeddings": {"prompt": "e: "}, "retrieval": {"prompt": "c ", "query_prompt": "a b: "}}[kind]
    task = task_with(type=kind).with_model(lambda: [source])
    assert task.data_summary.items() >= ({"similarity": similarity} | own).items()
    new_values = dict.fromkeys(own, "") | {"similarity": "cosine"}
    other = task_with(type=kind, **new_values).with_model(lambda: [source])
    assert other.data_summary.items() >= new_values.items()
    for name, one in (("same", task), ("other", other)):
        build(ModelConfig(source=str(folder), num_layers=1), one.head).save_pretrained(tmp_path / name)
        saved = json.loads((tmp_path / name / "config_sentence_transformers.json").read_text())
        if name == "same":
            assert saved == settings
        else:
            assert saved["similarity_fn_name"] == "cosine"
            assert [saved["prompts"].get(key) or "" for key in prompts] == (
                ["a b: ", "c ", "d ", ""] if kind == "embeddings" else ["", "", "d ", "e: "]
            )
    assert task_with(type=kind).with_model(list).data_summary.items() >= new_values.items()


@pytest.mark.parametrize(("side", "pooling"), [(side, mode) for side in ("left", "right") for mode in ("mean", "cls")])
def test_padding_and_truncation_on_either_side(side: str, pooling: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": pooling})
    tokenizer = resolve_source(str(folder)).tokenizer()
    tokenizer.padding_side = tokenizer.truncation_side = side
    tokenizer.save_pretrained(folder)
    model, vectors = own_vectors(folder, tmp_path / "texts")
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 16, "return_tensors": "pt"}
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, **options)
    with torch.no_grad():
        states = model.encoder.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"]
    first = states[range(len(TEXTS)), mask.argmax(1)]
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean if pooling == "mean" else first, dim=-1).numpy()
    assert vectors == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        assert model(**tokens).sentence_embedding.numpy() == pytest.approx(vectors, abs=1e-5)
    save_tokenizer(tokenizer, tmp_path / "saved", 16)
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    cut = saved["truncation"]
    assert (cut["max_length"], cut["direction"].lower(), saved["padding"]) == (16, side, None)
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (again.model_max_length, again.padding_side) == (16, "right")


def test_longer_texts_than_the_folder_s_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"})
    head = Head("AutoModel", vectors=VectorOptions(max_length=32))
    with pytest.raises(UserError, match=r"task\.max_length=32: .* was made for 16 tokens"):
        build(ModelConfig(source=str(folder), head="keep"), head)


def test_a_bare_encoder_has_no_head_to_keep(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"})
    (folder / "modules.json").unlink()
    head = Head("AutoModel", vectors=VectorOptions(max_length=16))
    with pytest.raises(UserError, match="how its states become a vector is not known"):
        build(ModelConfig(source=str(folder), head="keep"), head)
    new: Any = build(ModelConfig(source=str(folder), num_layers=1), head)
    assert new.modules_after.pooling == "mean"
    assert new.modules_after.is_normalized


def test_a_cut_keeps_the_modules_but_for_options(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "lasttoken"}, (6, "torch.nn.modules.activation.Tanh"))
    cut = ModelConfig(source=str(folder), num_layers=1)
    same: Any = build(cut, Head("AutoModel", vectors=VectorOptions(max_length=16)))
    assert same.modules_after.pooling == "last"
    assert same.modules_after.width(16) == 6
    other: Any = build(cut, Head("AutoModel", vectors=VectorOptions("cls", normalize=False, max_length=16)))
    assert other.modules_after.pooling == "cls"
    assert not other.modules_after.is_normalized


def test_the_fingerprint_knows_the_pooling(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"pooling_mode": "mean"})
    before = resolve_source(str(folder)).fingerprint
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert resolve_source(str(folder)).fingerprint != before


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "t5"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_sentence_transformers_gives_the_same(mode: str, include_prompt: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    prompt = "query: "
    prompts = {"prompts": {"q": prompt}, "default_prompt_name": "q"}
    pooling = {"pooling_mode": "mean" if mode == "t5" else mode, "include_prompt": include_prompt}
    folder = folder_with(tmp_path / "model", pooling, (5, "torch.nn.modules.activation.Tanh"), prompts=prompts)
    if mode == "t5":  # of an encoder-decoder, the encoder alone
        T5EncoderModel(T5Config(vocab_size=20, d_model=16, d_ff=32, num_layers=2)).save_pretrained(folder)
    theirs = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    model, own = own_vectors(folder, tmp_path / "texts", prompt)
    assert own == pytest.approx(theirs, abs=5e-6)
    model.save_pretrained(tmp_path / "written")
    resolve_source(str(folder)).tokenizer().save_pretrained(tmp_path / "written")
    again = library.SentenceTransformer(str(tmp_path / "written"), device="cpu").encode(TEXTS)
    assert again == pytest.approx(own, abs=5e-6)
