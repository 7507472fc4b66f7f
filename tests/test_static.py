"""Static students: a table of tokens that sentence-transformers and model2vec would read as it is read here."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill_runner.common.errors import UserError
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.deploy import onnx
from distill_runner.deploy.folder import ModelFolder
from distill_runner.models.build import build, load_model
from distill_runner.models.config import Head, ModelConfig, VectorOptions
from distill_runner.models.extract import extract
from distill_runner.models.features import FeatureRequest
from distill_runner.models.sources import read_shape, resolve_source
from helpers.sentence_folders import table_of

HEAD = Head("AutoModel", vectors=VectorOptions())
TEXTS = ["the film is good", "a bad film", "the", "good good bad unknownword"]


@pytest.fixture(scope="module")
def source(tiny_bert_folder: Path) -> str:
    return str(tiny_bert_folder)


def static(source: str) -> Any:
    return build(ModelConfig(source=source, layers="static"), HEAD)


def vectors(model: Any, tokenizer: Any, folder: Path) -> torch.Tensor:
    """Vectors of the texts by the packed path, as in training and evaluation."""
    folder.mkdir(exist_ok=True)
    TokenSplit.write(folder, Examples([TEXTS], None), tokenizer, 32)
    batch = TokenSplit(folder).batch(range(len(TEXTS)))
    order = batch.index.argsort()
    with torch.no_grad():
        return extract(model.eval(), batch, FeatureRequest(logits=True)).logits_OC[order]


def test_a_folder_holds_what_embedding_bag_reads_without_special_tokens(source: str, tmp_path: Path) -> None:
    """StaticEmbedding and model2vec tokenize without special tokens, and average the rows of ``embeddings``."""
    tokenizer, model = resolve_source(source).tokenizer(), static(source)
    own = vectors(model, tokenizer, tmp_path / "tokens")
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = load_file(folder / "model.safetensors")["embeddings"]
    for text, vector in zip(TEXTS, own, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(vector, torch.nn.functional.normalize(rows[ids].mean(0), dim=-1))
    modules = json.loads((folder / "modules.json").read_text())
    kinds = [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    assert kinds == [("StaticEmbedding", "."), ("Normalize", "1_Normalize")]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["normalize"]) == ("model2vec", True)
    again = load_model(folder, HEAD)
    assert torch.equal(vectors(again, tokenizer, tmp_path / "again"), own)
    assert read_shape(ModelConfig(source=str(folder), head="keep")).num_layers == 0
    assert resolve_source(str(folder)).download() == folder, "special tokens would count in a copy"
    assert onnx.input_names(again) == {"input_ids", "attention_mask"}, "what the exported mean reads"


def test_tokens_start_from_the_vectors_of_the_source(source: str) -> None:
    """By hand: the source's vector of the token alone, less the mean over tokens, times its weight by rank."""
    tokenizer, table = resolve_source(source).tokenizer(), static(source).encoder
    plain = build(ModelConfig(source=source), HEAD).encoder.eval()
    size, special = table.config.vocab_size, set(tokenizer.all_special_ids)
    first, last = tokenizer("")["input_ids"]
    with torch.no_grad():
        ids = torch.tensor([[first, token, last] for token in range(size)])
        means = plain(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1).numpy()
    others = [token for token in range(size) if token not in special]
    share = 1 / np.arange(2, size + 2)
    weight = 1e-4 / (1e-4 + share / share.sum())
    expected = (means - means[others].mean(0)) * weight[:, None]
    rows = table.embeddings.weight.detach().numpy()
    np.testing.assert_allclose(rows[others], expected[others], atol=1e-5)
    assert not rows[sorted(special)].any()


def test_a_table_of_tokens_is_for_vectors_alone(source: str) -> None:
    from distill_runner.models.build import num_outputs

    model = ModelConfig(source=source, layers="static")
    with pytest.raises(UserError, match="table of token vectors"):
        num_outputs(model, Head("AutoModelForSequenceClassification"), read_shape(model))
    with pytest.raises(UserError, match="has no layers"):
        read_shape(model.model_copy(update={"num_layers": 2}))
    with pytest.raises(UserError, match="normalized mean"):
        num_outputs(model, Head("AutoModel", vectors=VectorOptions("cls")), read_shape(model))


@pytest.mark.parametrize("form", ["plain", "cut", "nested", "dense", "clusters", "early"])
def test_tables_of_others_give_the_vectors_of_their_programs(form: str, source: str, tmp_path: Path) -> None:
    """Unknown and special tokens of a text count, and none are added; early folders of model2vec have no modules."""
    folder = table_of(tmp_path / "m", form, resolve_source(source).tokenizer())
    texts = [*TEXTS, "good [SEP] bad [CLS]", "the film is good and bad " * 90]
    expected = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu").encode(texts)
    if form == "early":
        (folder / "modules.json").unlink()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "label": 0.5}) + "\n" for text in texts))
    model = ModelFolder.read(str(folder), None, {"columns": ["text"]})
    own = np.load(io.BytesIO(model.predict_file(tmp_path / "a.jsonl", "cpu")[0]))  # type: ignore[arg-type]
    np.testing.assert_allclose(own, expected, atol=1e-3 if form in ("clusters", "early") else 1e-6)
    assert ("model2vec's rule" in str(resolve_source(str(folder)).unread_keys)) == (form in ("clusters", "early"))
    with pytest.raises(UserError, match="its source has none"):
        read_shape(ModelConfig(source=str(folder), num_layers=1))
    with pytest.raises(UserError, match="has one column, but pairs of texts are scored"):
        ModelFolder.read(str(folder), tmp_path / "a.jsonl", {"columns": ["text"]})
    (file := next(folder.rglob("model.safetensors"))).write_bytes(file.read_bytes()[:9])
    with pytest.raises(UserError, match="its table of tokens cannot be read"):
        ModelFolder.read(str(folder))
