"""Compare attention losses with a naive implementation: examples per second and peak memory, measured in turns.

    python benchmarks/attention_kl.py internal [--length 64] [--width 768] [--batch 32]
    python benchmarks/attention_kl.py relations [--length 512] [--batch 8]
    python benchmarks/attention_kl.py minilmv2 [--length 128] [--batch 16] [--bloomberg <clone of minilmv2.bb>]

``internal`` is the forward and backward pass of soft + kl + cos, from a 12-layer teacher to a 6-layer student with 12
heads. Its naive side uses padded batches, eager attention and ``output_attentions`` of both models. ``relations`` is
MiniLMv2's loss alone (48 relation heads, widths 768 and 384, Q-Q, K-K and V-V). Its naive side materializes the full
distributions and uses autograd. ``minilmv2`` is the forward and backward pass of MiniLMv2, from a teacher of 12 layers
of width 768 to a student of 6 layers of width 384, beside its reimplementations: bertdistiller 0.1.2 (``pip install
--no-deps bertdistiller loguru``) and github.com/bloomberg/minilmv2.bb. Sequence lengths vary from a quarter of the
length to the full length.

Each measurement runs in a separate process, in the order A B A B, after one warm-up update. Memory is the growth of the
process after models and inputs are created. It prints all measurements, then medians and ratios.

``--threads 1`` measures processor time, which other work on the machine affects little. With more threads than free
cores, threads wait for each other and an update takes many times longer.
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, BertModel

from benchmarks.loss import divergence
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.attention import relation_kl, row_weights
from distill_runner.methods.base import Progress
from distill_runner.methods.config import parse_method
from distill_runner.methods.outputs import Classes
from distill_runner.models.extract import extract
from distill_runner.models.features import EncoderShape

LAYERS, HEADS, RELATION_HEADS = (12, 6), 12, 48
TOP = {"rule": "group_top", "supervise_last": True}
TERMS: dict[str, dict[str, Any]] = {
    "soft": {"term": "soft_labels", "temperature": 1.0},
    "kl": {
        "term": "attention_relations",
        "mapping": TOP,
        "pairs": ["QK"],
    },
    "cos": {
        "term": "hidden_states",
        "mapping": TOP,
        "combine": "select",
        "distance": "cosine",
    },
}
Update = Callable[[], Tensor]


def batch_of(length: int, size: int) -> Batch:
    """Return a batch of ragged sequences of random tokens."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(length // 4, length + 1, size=size))
    lengths[-1] = length
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "ids.npy", rng.integers(1, 1000, size=lengths.sum()).astype(np.int32))
        np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
        np.save(folder / "segments.npy", np.zeros(lengths.sum(), dtype=np.int8))
        return TokenSplit(folder).batch(range(size))


def models(width: int, length: int, attention: str) -> list[Any]:
    built = []
    for num_layers in LAYERS:
        sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": 4 * width}
        config: Any = BertConfig
        config = config(vocab_size=1000, num_attention_heads=HEADS, max_position_embeddings=length, **sizes)
        config._attn_implementation = attention
        torch.manual_seed(num_layers)
        built.append(BertForSequenceClassification(config))
    return [built[0].eval().requires_grad_(False), built[1].eval()]  # no dropout, so that the losses can be compared


def internal_fast(options: argparse.Namespace) -> Update:
    batch, (teacher, student) = batch_of(options.length, options.batch), models(options.width, options.length, "sdpa")
    method = parse_method({"terms": TERMS, "weights": dict.fromkeys(TERMS, 1.0)}).make()
    method.bind(EncoderShape.from_config(student.config), EncoderShape.from_config(teacher.config), Classes())

    def update() -> Tensor:
        student_needs, teacher_needs = method.student_needs, method.teacher_needs
        with torch.no_grad():
            teacher_features = extract(teacher, batch, teacher_needs)
        losses = method(extract(student, batch, student_needs), teacher_features, batch, Progress(0, 0, 1, 1))
        return torch.stack(list(losses.values())).sum()

    return update


def internal_naive(options: argparse.Namespace) -> Update:
    """Return the update of a first script, written without the package's losses and features."""
    batch, (teacher, student) = batch_of(options.length, options.batch), models(options.width, options.length, "eager")
    ids, segments, mask = batch.to_padded()
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    outputs = {"output_attentions": True, "output_hidden_states": True}

    def update() -> Tensor:
        with torch.no_grad():
            teacher_outputs = teacher(**inputs, **outputs)
        student_outputs = student(**inputs, **outputs)
        loss = divergence(student_outputs.logits, teacher_outputs.logits, 1.0)
        for j in range(LAYERS[1]):
            k = 2 * j + 1
            attentions = teacher_outputs.attentions[k], student_outputs.attentions[j]
            p, q = (attention.clamp_min(1e-30) for attention in attentions)
            rows = (p * (p.log() - q.log())).sum(-1) * mask[:, None]
            loss = loss + ((rows.sum((1, 2)) / mask.sum(1)).mean() / HEADS) / LAYERS[1]
            cls = (teacher_outputs.hidden_states[k + 1][:, 0], student_outputs.hidden_states[j + 1][:, 0])
            loss = loss + (1 - cosine_similarity(*cls)).mean()
        return loss

    return update


def projections(batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Return packed Q, K and V of a teacher of width 768 and of a student of width 384."""
    torch.manual_seed(0)
    sizes = ((768, False), (384, True))
    teacher, student = (
        [torch.randn(len(batch.input_ids), width, requires_grad=requires_grad) for _ in "QKV"]
        for width, requires_grad in sizes
    )
    return teacher, student


def relations_fast(options: argparse.Namespace) -> Update:
    batch = batch_of(options.length, options.batch)
    teacher, student = projections(batch)
    weights = row_weights(batch, "sequence")

    def update() -> Tensor:
        pairs = zip(teacher, student, strict=True)
        return torch.stack([relation_kl((t, t), (s, s), RELATION_HEADS, batch.groups, weights) for t, s in pairs]).sum()

    return update


def relations_naive(options: argparse.Namespace) -> Update:
    batch = batch_of(options.length, options.batch)
    _, _, mask = batch.to_padded()
    teacher, student = projections(batch)

    def relation(side: Tensor) -> Tensor:
        padded = torch.zeros(*mask.shape, side.shape[1])
        padded[mask.bool()] = side
        heads = padded.unflatten(-1, (RELATION_HEADS, -1)).transpose(1, 2)
        scores = heads @ heads.transpose(2, 3) / heads.shape[-1] ** 0.5
        return scores.masked_fill(mask[:, None, None] == 0, -1e9).log_softmax(-1)

    def update() -> Tensor:
        loss = torch.zeros(())
        for t, s in zip(teacher, student, strict=True):
            log_p, log_q = relation(t), relation(s)
            rows = (log_p.exp() * (log_p - log_q)).sum(-1) * mask[:, None]
            loss = loss + (rows.sum((1, 2)) / mask.sum(1)).mean() / RELATION_HEADS
        return loss

    return update


MINILM = {"rule": "top"}
"""The last layer of the student learns from the last one of the teacher."""
SAME_PAIRS = {(1, 1): 1.0, (2, 2): 1.0, (3, 3): 1.0}
"""Weights of Q-Q, K-K and V-V as both reimplementations write them."""


def minilm_models(options: argparse.Namespace, attention: str = "sdpa") -> list[Any]:
    built = []
    for num_layers, width in zip(LAYERS, (768, 384), strict=True):
        sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": 4 * width}
        positions = {"max_position_embeddings": options.length}
        config: Any = AutoConfig.for_model("bert", vocab_size=1000, num_attention_heads=HEADS, **positions, **sizes)
        config.architectures = ["BertForMaskedLM"]  # which bertdistiller asks for
        config._attn_implementation = attention
        torch.manual_seed(num_layers)
        built.append(BertModel(config, add_pooling_layer=False).eval())
    return [built[0].requires_grad_(False), built[1]]


def minilm_own(options: argparse.Namespace) -> Update:
    batch, (teacher, student) = batch_of(options.length, options.batch), minilm_models(options)
    term = {"term": "attention_relations", "mapping": MINILM, "pairs": ["QQ", "KK", "VV"], "heads": RELATION_HEADS}
    method = parse_method({"terms": {"relations": term}, "weights": {"relations": 1.0}}).make()
    method.bind(EncoderShape.from_config(student.config), EncoderShape.from_config(teacher.config), Classes())

    def update() -> Tensor:
        with torch.no_grad():
            teacher_features = extract(teacher, batch, method.teacher_needs)
        losses = method(extract(student, batch, method.student_needs), teacher_features, batch, Progress(0, 0, 1, 1))
        return losses["relations"]

    return update


def padded_inputs(options: argparse.Namespace) -> dict[str, Tensor]:
    ids, segments, mask = batch_of(options.length, options.batch).to_padded()
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}


def minilm_bertdistiller(options: argparse.Namespace) -> Update:
    module: Any = importlib.import_module("bertdistiller.distillation.minilm.trainer")

    inputs, (teacher, student) = padded_inputs(options), minilm_models(options)
    trainer = module.MiniLMTrainer.__new__(module.MiniLMTrainer)  # whose loss needs nothing of a Trainer
    relations = {"num_relation_heads": RELATION_HEADS, "relations": SAME_PAIRS}
    trainer.args = argparse.Namespace(teacher_layer=LAYERS[0], student_layer=LAYERS[1], **relations)
    trainer.teacher, trainer.attention_extractor = teacher, module.BertAttentionExtractor()
    trainer.kl_loss = torch.nn.KLDivLoss(reduction="sum")
    return lambda: trainer.compute_loss(student, inputs)


def minilm_bloomberg(options: argparse.Namespace) -> Update:
    file = Path(options.bloomberg) / "minilmv2" / "minilmv2.py"
    spec: Any = importlib.util.spec_from_file_location("minilmv2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs, (teacher, student) = padded_inputs(options), minilm_models(options, "eager")  # it reads attentions
    model = module.MiniLM(teacher, student, *LAYERS, SAME_PAIRS, RELATION_HEADS)
    student.eval()
    return lambda: model(**inputs)[0]


SIDES = {
    "internal": {"naive": internal_naive, "distill-run": internal_fast},
    "relations": {"naive": relations_naive, "distill-run": relations_fast},
    "minilmv2": {
        "bertdistiller": minilm_bertdistiller,
        "minilmv2.bb": minilm_bloomberg,
        "distill-run": minilm_own,
    },
}


def measure(what: str, side: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return examples per second, MiB that the updates add to the process, and the loss."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    if options.threads:
        torch.set_num_threads(options.threads)
    update = SIDES[what][side](options)
    initial = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    update().backward()
    started, loss = clock(), torch.zeros(())
    for _ in range(options.updates):
        loss = update()
        loss.backward()
    rate = options.updates * options.batch / (clock() - started)
    return rate, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial) / 1024, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SIDES)
    parser.add_argument("--length", type=int, help="64, 512 or 128 by default")
    parser.add_argument("--batch", type=int, help="32, 8 or 16 by default")
    parser.add_argument("--bloomberg", help="clone of github.com/bloomberg/minilmv2.bb, which is left out otherwise")
    parser.add_argument("--width", type=int, default=768, help="of both models, for `internal`")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    options = parser.parse_args()
    options.length = options.length or {"internal": 64, "relations": 512, "minilmv2": 128}[options.what]
    options.batch = options.batch or {"internal": 32, "relations": 8, "minilmv2": 16}[options.what]
    sides = [side for side in SIDES[options.what] if side != "minilmv2.bb" or options.bloomberg]
    measurements: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    # An executor, since a pool would wait for ever for a process that was killed for lack of memory.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for _ in range(options.repeats):
            for side, results in measurements.items():
                results.append(pool.submit(measure, options.what, side, options).result())
                rate, memory, loss = results[-1]
                print(f"{side:13} {rate:8.2f} examples/s  {memory:7.0f} MiB  loss {loss:.6f}", flush=True)
    medians = {}
    for side, results in measurements.items():
        rates, memories, _ = zip(*results, strict=True)
        medians[side] = statistics.median(rates), statistics.median(memories)
        spread = f"(min {min(rates):.2f}, max {max(rates):.2f})"
        print(f"median {side:13} {medians[side][0]:8.2f} examples/s {spread}  {medians[side][1]:7.0f} MiB")
    for side in sides[:-1]:
        rate, memory = (own / other for own, other in zip(medians["distill-run"], medians[side], strict=True))
        print(f"distill-run has {rate:.2f} of the speed of {side}, and {memory:.2f} of its memory")


if __name__ == "__main__":
    main()
