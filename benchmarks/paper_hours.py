"""Estimate the GPU hours of every command in docs/papers from its plan. Nothing is trained or downloaded.

    DISTILL_DATA_DIR=<folder with amazon_reviews/ and wiki_paragraphs/> python -m benchmarks.paper_hours [--missing]

writes docs/papers/hours.yaml after each command (a quarter of an hour in total).

It counts the operations of all matrix products: 3 forward passes for each training example, and one for each example
that a teacher reads or that is evaluated. Stages that points share count once, also if they are shared by the commands
of one row: the first of these commands has them. No GPU is used: ``GPUS`` has the rates, and says which are measured.
On a machine with a GPU, ``plan=true`` measures times instead.
"""

import argparse
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

PAGES = Path(__file__).parents[1] / "docs" / "papers"
HEAD = "# Made by `python -m benchmarks.paper_hours`, which says what is counted, and by which rates.\n"
GPUS = {"h200": (270e12, 0.0004), "v100": (43e12, 0.0007)}
"""Operations a second, and seconds of an update for each layer that do not depend on its tokens.

H200: of updates as CUDA graphs in bf16, of a student of 4 layers and width 768 with 32 examples of RTE and of SST-2
(docs/clusters.md), 2026-11-27: 1.6 ms and 0.62 ms for 1,000 tokens. V100: not measured. The operations are the same
share (35%) of its peak in fp16, 125e12; of the 0.0003 s more, reading and writing weights and averages takes most,
at 0.9 instead of 4.8 TB/s.
"""
OF_A_CONVOLUTION = 0.1
"""Share of a layer's fixed seconds that a convolution takes with the operations around it, by its kernels."""
SHARED = {"minilmv2": ("optim.lr", "seed"), "alp_kd": ("optim.lr",), "internal": ("seed",)}
"""Axes of a paper's sweeps whose values all cost the same, and change no stage except the last."""

LOCAL = ("amazon_reviews", "wiki_paragraphs")
"""Data sets that are not on the hub."""
UNREAD = {"sweep=pro_kd/table3": f"task.labels=[{','.join(f'class{number}' for number in range(100))}]"}
"""Argument of a command -> override for values that its plan would read from the data: CIFAR-100's class names."""


@dataclass(frozen=True)
class Data:
    """Numbers of examples, and mean tokens by ``max_length``, by BERT's tokenizer on the data or an available part."""

    train: int
    validation: int
    tokens: Mapping[int, float]


LONG_TEXTS = {64: 60.8, 128: 106.0, 512: 196.3}
DATA = {
    "cola": Data(8551, 1043, {128: 11.3}),
    "sst2": Data(67349, 872, {128: 13.3}),
    "mrpc": Data(3668, 408, {64: 51.7, 128: 53.2}),
    "rte": Data(2490, 277, {64: 52.1, 128: 66.6, 512: 70.2}),
    "stsb": Data(5749, 1500, {128: 27.8}),
    "wnli": Data(635, 71, {128: 37.1}),
    "mnli": Data(392702, 19647, {64: 38.4, 128: 39.9}),
    "qnli": Data(104743, 5463, {64: 46.3, 128: 48.8}),
    "qqp": Data(363846, 40430, {128: 30.8}),
    "squad": Data(88524, 10784, {384: 171.8}),
    "squad_v2": Data(132000, 12232, {384: 171.8}),
    "mlqa": Data(88524, 10784, {384: 171.8}),
    "xnli": Data(392702, 15 * 2490, {128: 39.9}),
    "nli_star": Data(1306000, 0, {128: 36.0}),
    "imdb": Data(50000, 0, {64: 63.8, 128: 123.7, 512: 272.8}),
    "wiki_paragraphs": Data(18891, 0, {64: 61.4, 128: 100.7, 512: 126.2}),
    "cifar10": Data(50000, 10000, {}),
    "cifar100": Data(50000, 10000, {}),
    **{f"amazon_{domain}": Data(1700, 300, LONG_TEXTS) for domain in ("books", "dvd", "electronics", "kitchen")},
    "book_reviews": Data(1700, 300, LONG_TEXTS),
}
"""Sizes by task or transfer set. SQuAD counts windows of 384 tokens. SNLI contributes 549,367 pairs to NLI*."""

BERTS = {"bert-base-uncased": (12, 768), "bert-large-uncased": (24, 1024)}
MODELS: dict[str, tuple[str, int, int]] = {
    **{f"google-bert/{name}": ("bert", *sizes) for name, sizes in BERTS.items()},
    "google-bert/bert-large-uncased-whole-word-masking": ("bert", 24, 1024),
    "FacebookAI/roberta-base": ("roberta", 12, 768),
    "FacebookAI/roberta-large": ("roberta", 24, 1024),
    "distilbert/distilroberta-base": ("roberta", 6, 768),
    "distilbert/distilbert-base-uncased": ("bert", 6, 768),
    "FacebookAI/xlm-roberta-base": ("xlm-roberta", 12, 768),
    "FacebookAI/xlm-roberta-large": ("xlm-roberta", 24, 1024),
    **{
        f"google/bert_uncased_L-{layers}_H-{width}_A-{width // 64}": ("bert", layers, width)
        for layers in (2, 4, 6, 8, 10, 12)
        for width in (128, 256, 512, 768)
    },
}
"""Hub id -> architecture, layers and width, from which the operations of a model are counted."""


def forward(layers: int, width: int, tokens: float) -> float:
    """Return the operations of a text of ``tokens`` in an encoder whose feed-forward width is 4 times ``width``."""
    return layers * tokens * (24 * width**2 + 4 * width * tokens)


def forward_resnet(depth: int) -> float:
    """Return the operations of an image of 32 x 32 in a CIFAR ResNet, whose stages all cost the same."""
    return 2 * (9 * 3 * 16 + (depth - 2) * 9 * 16 * 16) * 32 * 32


@dataclass
class Count:
    """Operations of a command, and the layers that its updates run through."""

    operations: float = 0.0
    layers: float = 0.0

    def rounded(self) -> dict[str, float]:
        hours = {name: (self.operations / speed + self.layers * fixed) / 3600 for name, (speed, fixed) in GPUS.items()}
        return {name: float(f"{value:.2g}") for name, value in {"operations": self.operations, **hours}.items()}

    def add(self, operations: float, layers: float = 0.0, times: int = 1) -> None:
        self.operations += times * operations
        self.layers += times * layers


def data_of(stage: Any) -> tuple[Data, float]:
    """Return the sizes of the data that a stage trains on, and the mean tokens of an example."""
    config = stage.config
    if config.corpus is not None:
        return Data(10**9, 0, {}), config.corpus.max_length
    data = DATA[config.transfer.name if config.transfer else config.task.name]
    if config.transfer:
        data = replace(data, train=config.transfer.size or data.train, validation=DATA[config.task.name].validation)
    if not data.tokens:
        return data, 0
    limit = next((length for length in sorted(data.tokens) if length >= config.task.max_length), max(data.tokens))
    return replace(data, train=int(data.train * stage.share)), min(data.tokens[limit], config.task.max_length)


def one_pass(stage: Any, tokens: float) -> float:
    """Return the operations of a forward pass of one example through the stage's model."""
    if stage.shape.reads_images:
        return forward_resnet(int(stage.root.config.model.architecture["depth"]))
    shape = stage.shape
    words = 0.15 * tokens * 2 * (shape.width**2 + shape.width * shape.vocab_size) if stage.is_masked else 0
    return forward(shape.num_layers, shape.width, tokens) + words


def count_stage(stage: Any, count: Count, visited: set[Any], times: int = 1) -> None:
    """Add the cost of a stage to ``count``, trained ``times`` times on the same outputs of its teacher."""
    from distill_runner.pipeline.targets import live_reason

    (data, tokens), optim = data_of(stage), stage.config.optim
    if stage.config.prediction_source is not None or optim.epochs == 0:
        return
    per_epoch = -(-data.train // optim.batch_size)
    updates = optim.num_steps(per_epoch)
    trained, evaluated = updates * optim.batch_size, data.validation * -(-updates // per_epoch)
    one = one_pass(stage, tokens)
    operations = 3 * trained * one + evaluated * one
    if stage.teacher is not None:
        teacher_pass = one_pass(stage.teacher, tokens)
        if stage.is_corpus or live_reason(stage, "auto"):
            operations += trained * teacher_pass
        else:
            new = {
                (stage.teacher.key, str(stage.data_spec), followed) for followed in stage.teacher_checkpoints
            } - visited
            visited |= new
            count.add(len(new) * data.train * teacher_pass)
    share = OF_A_CONVOLUTION if stage.shape.reads_images else 1.0
    count.add(operations, updates * stage.shape.num_layers * share, times)


def count_grid(points: Sequence[Any], times: int, visited: set[Any]) -> Count:
    """Return the cost of all points, with the stages that points share counted once.

    Args:
        visited: keys of the stages that are already counted; receives those of this grid.
    """
    count = Count()
    for point in points:
        if point.error:
            raise point.error
        for stage in reversed(point.stage.all_upstream):
            if stage.key not in visited:
                visited.add(stage.key)
                count_stage(stage, count, visited)
        count_stage(point.stage, count, visited, times)
    return count


def points_of(arguments: Sequence[str], paper: str) -> tuple[Any, int]:
    """Return the points of a command for the first values of its SHARED axes, and the number of their combinations."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from distill_runner.compose import resolvers
    from distill_runner.compose.folders import config_folder
    from distill_runner.sweeping.points import expand

    resolvers.register()
    fixed = [argument for argument in arguments if "," not in argument]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config("config", fixed, RunMode.MULTIRUN, with_log_configuration=False)
        params, times = dict(master.hydra.sweeper.params or {}), 1
        params |= {key: value for key, _, value in (argument.partition("=") for argument in arguments) if key in params}
        for key in SHARED.get(paper, ()):
            if key in params:
                first, *others = str(params[key]).split(",")
                params[key], times = first, times * (1 + len(others))
        unread = [UNREAD[argument] for argument in arguments if argument in UNREAD]
        others = [argument for argument in arguments if argument.partition("=")[0] not in params]
        overrides = [*(f"{key}={value}" for key, value in params.items()), *others, *unread]
        return expand(master, hydra.config_loader, overrides, master.sweep.where).points, times


def pretend(cache: Path) -> None:
    """Fill ``cache`` with configurations and a tiny tokenizer for MODELS and links to LOCAL; make up hub commits."""
    (cache / "data").mkdir()
    for name in LOCAL:
        (cache / "data" / name).symlink_to(Path(os.environ["DISTILL_DATA_DIR"]) / name)
    os.environ |= {"DISTILL_DATA_DIR": str(cache / "data"), "HF_HUB_OFFLINE": "1"}
    from huggingface_hub import constants  # the import reads the environment
    from transformers import AutoConfig, BertTokenizer

    from distill_runner.common import hub

    constants.HF_HUB_CACHE = str(cache)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    for name, (model_type, layers, width) in MODELS.items():
        sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
        length = 512 if model_type == "bert" else 514
        vocab_size = {"bert": 30522, "roberta": 50265}.get(model_type, 250002)
        sizes |= {"num_attention_heads": width // 64, "vocab_size": vocab_size, "max_position_embeddings": length}
        folder = hub.Commit("model", name, _sha(name)).folder
        AutoConfig.for_model(model_type, **sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    hub.request_commit = lambda repo_type, name, revision: hub.Commit(repo_type, name, _sha(name))


def _sha(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def commands_by_row() -> dict[tuple[str, str], list[str]]:
    """Return the training commands of each row, by paper and place."""
    papers = yaml.safe_load((PAGES / "rows.yaml").read_text(encoding="utf-8"))
    pattern = re.compile(r"distill-run (sweep=|-m )")
    return {
        (paper, place): [command for command in str(row[2]).split("; ") if pattern.match(command)]
        for paper, content in papers.items()
        for place, row in content["rows"].items()
    }


def commands() -> list[str]:
    """Return every training command in the rows of the papers."""
    return list(dict.fromkeys(command for row in commands_by_row().values() for command in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="only rows with commands that the file lacks")
    file = PAGES / "hours.yaml"
    hours = yaml.safe_load(file.read_text(encoding="utf-8")) if parser.parse_args().missing and file.exists() else {}
    with TemporaryDirectory() as cache:
        pretend(Path(cache))
        for (paper, _), row in commands_by_row().items():
            visited = set[Any]()
            for command in row if set(row) - set(hours) else []:
                points, times = points_of([part for part in shlex.split(command)[1:] if part != "-m"], paper)
                count = count_grid(points, times, visited)
                hours[command] = count.rounded() | {"trainings": len(points) * times}
                print(f"{command}: {hours[command]}", flush=True)
                ordered = {name: hours[name] for name in commands() if name in hours}
                file.write_text(HEAD + yaml.safe_dump(ordered, sort_keys=False, width=150), encoding="utf-8")


if __name__ == "__main__":
    main()
