"""Keys of the files beside weights: each that a library writes has a place, and none is read as another value."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from distill_runner.common.errors import UserError
from distill_runner.models.build import build
from distill_runner.models.config import Head, ModelConfig
from distill_runner.models.metadata import KEYS, OF_ENCODERS, REFUSED, REPORTED, status_of, unread_keys
from distill_runner.models.sources import METADATA_FILES, resolve_source
from distill_runner.tasks import make_task
from helpers.families import FAMILIES, config_of
from helpers.foreign_folders import save
from helpers.tiny_tokenizers import TYPES, make

NO_PLACE: tuple[str, list[Any]] = (REPORTED, [])
SENTENCE_KEYS = {
    "sentence_bert_config.json": [
        *("transformer_task", "modality_config", "module_output_name", "processing_kwargs", "unpad_inputs"),
        *("query_length", "document_length", "query_expansion", "max_seq_length", "do_lower_case", "model_args"),
    ],
    "config_sentence_transformers.json": [
        *("__version__", "default_prompt_name", "model_type", "prompts", "similarity_fn_name", "requirements")
    ],
    "modules.json": ["idx", "name", "path", "type", "kwargs"],
    "Pooling/config.json": ["embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt"],
    "Dense/config.json": [
        *("in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"),
        "use_residual",
    ],
    "Normalize/config.json": ["module_input_name", "module_output_name"],
}
"""Keys that sentence-transformers 6.2 writes, or reads in older folders."""


def written_keys(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of the table in a folder, each with its keys."""
    for file in METADATA_FILES:
        if (folder / file).is_file():
            yield from ((file, key) for key in json.loads((folder / file).read_text()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_of_a_configuration_has_a_place(family: str, tmp_path: Path) -> None:
    config = config_of(family, problem_type="regression", output_attentions=True)
    config.save_pretrained(tmp_path)
    own = {*dir(type(config)), *config.attribute_map}
    assert [key for file, key in written_keys(tmp_path) if status_of(file, key) == NO_PLACE and key not in own] == []
    assert resolve_source(str(tmp_path)).unread_keys == []


@pytest.mark.parametrize("kind", TYPES)
def test_each_key_of_a_tokenizer_has_a_place(kind: str, tmp_path: Path) -> None:
    tokenizer = make(kind)
    tokenizer("a", truncation=True, max_length=8, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    assert [pair for pair in written_keys(tmp_path) if status_of(*pair) == NO_PLACE] == []


def test_each_argument_of_the_tokenizers_of_encoders_has_a_place() -> None:
    names = {name for family in FAMILIES if (name := TOKENIZER_MAPPING_NAMES.get(family))}
    parameters = {key for name in names for key in inspect.signature(getattr(transformers, name).__init__).parameters}
    keys = parameters - {"self", "args", "kwargs"}
    assert len(keys) > 10
    assert [key for key in sorted(keys) if status_of("tokenizer_config.json", key) == NO_PLACE] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_before_a_text_is_named_where_it_shifts_positions(family: str, tmp_path: Path) -> None:
    """Other programs then give a text another output, by the longest text of its batch."""
    torch.manual_seed(0)
    network = AutoModel.from_config(config := config_of(family)).eval()
    padding, text = torch.full((1, 4), config.pad_token_id), torch.arange(7, 13)[None]
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(text)], 1)
    with torch.inference_mode():
        own = network(text).last_hidden_state
        padded = network(torch.cat([padding, text], 1), attention_mask=mask).last_hidden_state[:, 4:]
    shifts = not torch.allclose(own, padded, atol=1e-4)
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"padding_side": "left"}')
    assert resolve_source(str(tmp_path)).unread_keys == ['tokenizer_config.json: padding_side="left"'] * shifts


def test_a_model_that_returns_attention_can_be_saved(tmp_path: Path) -> None:
    """A run was lost after its first epoch."""
    save(tmp_path / "m", "classes")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_attentions": True}))
    for layers in (None, 1):
        build(ModelConfig(source=str(tmp_path / "m"), num_layers=layers), Head("AutoModel")).save_pretrained(tmp_path)


def test_a_length_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "classes")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": "9"}))
    with pytest.raises(UserError, match="model_max_length='9', which is no number"):
        resolve_source(str(tmp_path)).tokenizer()


def test_each_key_of_an_image_processor_has_a_place(tmp_path: Path) -> None:
    transformers.ViTImageProcessor(do_center_crop=True, crop_size=8).save_pretrained(tmp_path)
    assert [pair for pair in written_keys(tmp_path) if status_of(*pair) == NO_PLACE] == []


def test_each_key_of_sentence_transformers_has_a_place() -> None:
    keys = {(file, key) for file, own in SENTENCE_KEYS.items() for key in own}
    try:
        from sentence_transformers.base.modules import Dense, Normalize, Transformer
        from sentence_transformers.sentence_transformer.modules import Pooling
    except ImportError:
        pass
    else:
        keys |= {("sentence_bert_config.json", key) for key in Transformer.config_keys}
        modules = {"Pooling": Pooling, "Dense": Dense, "Normalize": Normalize}
        keys |= {(f"{name}/config.json", key) for name, module in modules.items() for key in module.config_keys}
    assert [pair for pair in sorted(keys) if status_of(*pair) == NO_PLACE] == []


def odd_keys() -> Iterator[tuple[str, str, str]]:
    """Each file of the table with a key that has another value than the one assumed, and with a key in no list."""
    for file, statuses in KEYS.items():
        if all("*" not in keys for keys in statuses.get("harmless", {}).values()):
            yield file, "a_new_key", REPORTED
        for status in (status for status in (REFUSED, OF_ENCODERS, REPORTED) if status in statuses):
            yield from ((file, key, status) for key in statuses[status])


@pytest.mark.parametrize(("file", "key", "status"), list(odd_keys()))
def test_a_value_that_is_not_assumed_is_refused_or_named(file: str, key: str, status: str) -> None:
    content = {key: {"odd": 1}}
    if status == REPORTED:
        name = file.partition("/")[0] if "/" in file else file
        assert unread_keys(content, file, "m") == [f'{name}: {key}={{"odd": 1}}']
        return
    with pytest.raises(UserError, match=rf'model\.source=m: {file} has {key}={{"odd": 1}}, which is not read'):
        unread_keys(content, file, "m")
    for assumed in KEYS[file][status][key]:
        assert unread_keys({key: assumed}, file, "m") == []
    if status == OF_ENCODERS:
        assert unread_keys(content, file, "m", is_encoder=False) == []


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    config_of("bert").save_pretrained(tmp_path)
    for text in ("[1]", "{"):
        (tmp_path / "special_tokens_map.json").write_text(text)
        with pytest.raises(UserError, match=r"its special_tokens_map\.json is no JSON object"):
            _ = resolve_source(str(tmp_path)).unread_keys


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, ""),
        ({"image_mean": [0.1, 0.2, 0.3]}, r"task\.mean=\[0\.1,0\.2,0\.3\]"),
        ({"do_normalize": False}, r"'task\.mean=\[0,0,0\]' 'task\.std=\[1,1,1\]'"),
        ({"size": 16}, r"task\.resize=\[16,16\]"),
        ({"size": {"shortest_edge": 16}}, r"other values of size .*\n.*teacher\.fine_tuned=false"),
        ({"do_center_crop": True}, r"other values of do_center_crop .*\n.*teacher\.fine_tuned=false"),
        ({"rescale_factor": 1.0}, r"other values of rescale_factor .*\n.*teacher\.fine_tuned=false"),
        ({"resample": 3}, r"other values of resample .*\n.*teacher\.fine_tuned=false"),
    ],
)
def test_a_kept_head_gets_images_as_its_folder_says(changes: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    """A teacher was fed images of another mean, and scored as if they were its own."""
    fields = {
        "dataset": "d",
        "columns": ["image"],
        "labels": ["a", "b"],
        "resize": (8, 8),
        "epochs": 1,
        "metrics": None,
    }
    task = make_task(name="own", type="images", validation={"v": "v"}, **fields)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | changes))
    if not remedy:
        task.check_kept(resolve_source(str(tmp_path)))
        task.save_preprocessor(tmp_path)
        task.check_kept(resolve_source(str(tmp_path)))
        return
    with pytest.raises(UserError, match=remedy):
        task.check_kept(resolve_source(str(tmp_path)))


@pytest.mark.parametrize("odd", [{"is_causal": True}, {"is_decoder": True}, {"return_dict": False}])
def test_a_decoder_is_never_packed_as_an_encoder(odd: dict[str, bool], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("bert").to_dict() | odd))
    with pytest.raises(UserError, match=f"{next(iter(odd))}="):
        resolve_source(str(tmp_path)).config()
