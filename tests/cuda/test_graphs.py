"""Updates recorded as graphs: the same losses as updates called directly, and few calls of the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_updates import losses_of  # type: ignore[import-not-found]

from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.methods.base import LossTerm, Progress
from distill_runner.models.features import FeatureRequest
from distill_runner.pipeline.build import Pipeline
from distill_runner.training.devices import Device
from distill_runner.training.graphs import Graphs, end_failed_recording
from distill_runner.training.train import Training
from fake_cuda import COUNTS
from helpers.small_runs import made_small

Compose = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _hardly_any_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled batches draw other numbers; with so small a share, none is dropped."""
    built = Pipeline._initial_model

    def model_of_small_dropout(pipeline: Pipeline, *args: Any) -> Any:
        model = built(pipeline, *args)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 1e-9
        return model

    monkeypatch.setattr(Pipeline, "_initial_model", model_of_small_dropout)


@contextmanager
def counted() -> Iterator[list[tuple[int, int, int]]]:
    """Of each update the replays, their kernels, and all other launches and copies; a real GPU counts replays alone."""
    found: list[tuple[int, int, int]] = []
    replays, kernels, step, replay = [0], [0], Training.take_update, torch.cuda.CUDAGraph.replay

    def replay_counted(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        kernels[0] = getattr(graph, "kernels", 0)
        replay(graph)

    def step_counted(training: Training, *arguments: Any) -> None:
        COUNTS.reset()
        replays[0] = 0
        step(training, *arguments)
        others = COUNTS.launches.total() + COUNTS.copies.total() - COUNTS.launches["replay"]
        found.append((replays[0], kernels[0], others))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "take_update", step_counted)
        patch.setattr(torch.cuda.CUDAGraph, "replay", replay_counted)
        yield found


@pytest.fixture
def compare(compose: Compose, tmp_path: Path, caplog: Any) -> Callable[..., None]:
    """A function that checks the losses of graphs for a run."""
    caplog.set_level("INFO")

    def compared(name: str, precision: str, *overrides: str, tiny: bool = True) -> None:
        losses, launches = dict[str, list[float]](), dict[str, list[tuple[int, int, int]]]()
        for graphs in ("false", "true"):
            options = (f"store.dir={tmp_path}/{graphs}", f"runtime.graphs={graphs}")
            run = compose(*overrides, "optim.max_steps=8", "optim.epochs=8", *options, tiny=tiny)
            with counted() as launches[graphs]:
                losses[graphs] = [point["loss"] for point in losses_of(run, "cuda:0", precision)]
        assert all(text.endswith("runtime.graphs=false") for text in caplog.messages if "without graphs" in text)
        others = [others for replays, _, others in launches["true"] if replays]
        pairs = zip(losses["false"], losses["true"], strict=True)
        difference = max(abs(eager - graph) / abs(eager) for eager, graph in pairs)
        most, total, (_, kernels, _) = max(others), len(launches["true"]), launches["true"][-1]
        print(f"| {name} | {precision} | {len(others)} of {total} | {kernels} | {most} | {difference:.0e} |")
        # Texts of weight 0 change the order of sums: 3e-5 after ten updates. A graph of another key differs by 2e-2.
        assert difference < {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}[precision]
        assert most <= 12

    return compared


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", choices("method"))
def test_losses_of_graphs(method: str, precision: str, compare: Callable[..., None]) -> None:
    compare(method, precision, f"method={method}", *made_small((f"method={method}",)))


PRETRAINED = ("student.width=32", "student.heads=2", "pretraining.optim.max_steps=8", "pretraining.optim.batch_size=8")
TYPES = {
    "classes": ("task=demo_pairs",),
    "several labels": ("task=custom", "task.type=multilabel", "task.label=tags", "task.separator=semicolon"),
    "scores": ("task=custom", "task.type=regression", "task.label=score", "task.metrics=[pearson]"),
    "questions": ("task=demo_questions",),
    "tokens": ("task=demo_tokens",),
    "accumulation": ("task=demo_tokens", "optim.accumulation=2"),
    "vectors": ("task=demo_vectors", "transfer=labeled", "teacher.optim.epochs=0"),
    "margins": (
        "task=demo_vectors",
        "transfer=labeled",
        "teacher.optim.epochs=0",
        "task.train_columns=[sentence1,sentence2]",
        "+method.terms.margins={term: margins}",
        "+method.weights.margins=1",
    ),
    "images": ("task=demo_digits", "teacher=resnet", "student=resnet8", "optim=cifar", "teacher.depth=8"),
    "masked tokens": ("task=demo_pairs", "student=fresh_tiny", "corpus=embedded", "corpus.max_length=48", *PRETRAINED),
}
METHODS = {"images": "vanilla", "vectors": "vectors", "margins": "vectors", "masked tokens": "pretrain"}


@pytest.mark.parametrize("kind", TYPES)
def test_losses_of_task_types(
    kind: str, compare: Callable[..., None], tiny_bert_folder: Path, tiny_task_folder: Path, tmp_path: Path
) -> None:
    own: tuple[str, ...] = ()
    if "task=custom" in TYPES[kind]:
        rows = (tiny_task_folder / "train.csv").read_text().splitlines()
        tags = [f"{row},{number % 5 / 2},{('red', 'red;blue', 'blue')[number % 3]}" for number, row in enumerate(rows)]
        for split in ("train", "validation"):
            (tmp_path / f"{split}.csv").write_text("\n".join([f"{rows[0]},score,tags", *tags[1:]]))
        own = (f"task.dataset={tmp_path}", "task.columns=[sentence1]")
    texts = ("teacher=base", f"teacher.source={tiny_bert_folder}", "student.num_layers=2")
    sizes = ["optim.batch_size=16", "teacher.optim.max_steps=4", "runtime.log_every=2", "task.max_length=32"]
    if not own:  # few examples, so that shapes repeat
        sizes += ["task.train=train[:32]", "task.validation.validation=validation[:20]"]
    named = (f"method={METHODS.get(kind, 'rkd')}", *TYPES[kind], *own, *(() if kind == "images" else texts), *sizes)
    compare(kind, "fp32", *dict.fromkeys(named), tiny=False)


@pytest.mark.parametrize(
    "choice",
    [
        ("method=internal", "schedule=pid", "schedule.limits=[1,1,1]"),
        ("method=pkd", "mapping=rail"),
        ("method=prokd", "stages.phase1.optim.batch_size=200"),
        ("method=rco", "route.checkpoints=[1,2,1]", "runtime.targets=live", "optim.batch_size=200"),
    ],
)
def test_a_graph_is_replayed_only_in_its_phase(choice: tuple[str, ...], compare: Callable[..., None]) -> None:
    """Layers that follow one another, and layers that are drawn anew in each epoch, of a teacher in a cache.

    A teacher that a route comes back to is loaded again, and lies elsewhere.
    """
    sizes = ("student.num_layers=3", "teacher.optim.epochs=3", "runtime.log_every=2")
    compare(choice[0], "fp32", *sizes, *choice)


def recorded(body: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        body()
    return graph


@pytest.fixture
def pool() -> Iterator[Any]:
    """Memory of graphs, whose recording may fail."""
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    yield pool
    end_failed_recording(stream, pool)


def begin_a_branch(x: torch.Tensor) -> None:
    branch = torch.cuda.Stream()
    branch.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(branch):
        x.add_(1)


@pytest.mark.parametrize(
    "body",
    [
        begin_a_branch,  # for which nothing waits
        lambda x: x.add_(torch.ones(3).cuda()),  # from memory that is not pinned
        lambda x: x.add_(x.sum().item()),
        lambda x: x[x > 0],  # whose size the host must know
        lambda x: torch.manual_seed(0) and x.add_(torch.rand(3, device="cuda")),
        lambda x: torch.cuda.synchronize(),
        lambda x: x.add_(torch.empty(3, pin_memory=True).to("cuda", non_blocking=True)),
    ],
)
def test_what_a_recording_must_not_do(body: Callable[[torch.Tensor], Any], pool: Any) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="captur"):
        recorded(lambda: body(x), pool)


def test_a_replay_computes_again_from_what_its_inputs_hold() -> None:
    """And nothing while it records; a number of Python is that of the recording."""
    x, y, numbers = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), [2.0]
    graph = recorded(lambda: y.copy_(x * numbers[0]).add_(x.sum()))
    assert y.cpu().tolist() == [0, 0, 0]
    graph.replay()
    assert y.cpu().tolist() == [5, 5, 5]
    x.fill_(2)
    numbers[0] = 3.0
    graph.replay()
    assert y.cpu().tolist() == [10, 10, 10]


def test_memory_of_a_pool_holds_what_the_last_replay_computed(pool: Any) -> None:
    x, results = torch.ones(3, device="cuda"), list[torch.Tensor]()
    first = recorded(lambda: results.append(x * 2), pool)
    assert results[0].isnan().all(), "nothing is computed yet"
    second = recorded(lambda: results.append(x * 3), pool)
    first.replay()
    assert results[0].cpu().tolist() == [2, 2, 2]
    second.replay()
    assert results[1].cpu().tolist() == [3, 3, 3]
    assert results[0].isnan().all()


def test_a_replay_makes_no_host_wait_and_returns_values_of_its_own() -> None:
    """The inputs come from pinned memory; the values of an update outlast the next one."""

    def update(parts: Any, rate: torch.Tensor, _: Progress) -> dict[str, torch.Tensor]:
        return {"sum": sum(batch.sum() for batch, _ in parts) * rate}

    graphs = Graphs(Device.from_name("cuda:0", "fp32"))
    COUNTS.reset()
    rate, progress = torch.tensor(2.0), Progress(0, 0, 1, 4)
    batches: list[Any] = [torch.full((3,), float(number)) for number in range(5)]
    values = [graphs(update, [(batch, None)], rate, progress, None)["sum"] for batch in batches]
    assert not COUNTS.waits
    assert [value.item() for value in values] == [0, 6, 12, 18, 24]


def test_an_update_that_does_not_fit_beside_the_graphs_is_taken_without_them() -> None:
    def update(parts: Any, rate: torch.Tensor, _: Progress) -> dict[str, torch.Tensor]:
        ((batch, _target),) = parts
        if len(batch) == 5 and any(graphs.recorded.values()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"sum": batch.sum() * rate}

    graphs, progress = Graphs(Device.from_name("cuda:0", "fp32")), Progress(0, 0, 1, 4)
    batches: list[Any] = [torch.ones(size) for size in (3, 3, 3, 5, 5, 3)]
    values = [graphs(update, [(batch, None)], torch.tensor(2.0), progress, None)["sum"] for batch in batches]
    assert [value.item() for value in values] == [6, 6, 6, 10, 10, 6]
    assert not graphs.is_on


class OfTheStep(LossTerm):
    """A term of a user that depends on the number of the update, which a graph would have as a constant."""

    reads_teacher = False
    weighs_examples = True

    def bind(self, student: Any, teacher: Any, outputs: Any) -> None:
        self.student_needs = FeatureRequest(logits=True)

    def forward(self, student: Any, teacher: Any, batch: Any, progress: Any) -> torch.Tensor:
        losses_B = student.logits_OC.square().mean(-1)
        weights = 1 if batch.example_weights is None else batch.example_weights
        return (losses_B * weights).mean() * self.factor(progress)

    def factor(self, progress: Any) -> int:
        return int(progress.step) + 1


class ReadsInBackward(OfTheStep):
    """A term of a user that reads a value in the backward pass, when the last layers have their gradients already."""

    def bind(self, student: Any, teacher: Any, outputs: Any) -> None:
        self.student_needs = FeatureRequest(logits=True, states=frozenset({1}))

    def forward(self, student: Any, teacher: Any, batch: Any, progress: Any) -> torch.Tensor:
        first_layer = student.states[1].grad_fn.next_functions[0][0]
        first_layer.register_prehook(lambda gradients: gradients[0].sum().item() and None)
        return super().forward(student, teacher, batch, progress)

    def factor(self, progress: Any) -> int:
        return 1


@pytest.mark.parametrize(
    ("term", "reason"), [(OfTheStep, "a term reads the number of the step"), (ReadsInBackward, "_local_scalar_dense")]
)
def test_a_term_that_cannot_be_recorded(
    term: type[LossTerm], reason: str, compose: Compose, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, option, stream = {}, f"method.terms.ce.term={__name__}.{term.__name__}", torch.cuda.current_stream()
    with caplog.at_level("INFO"):
        for graphs in ("false", "true"):
            options = ("method=nkd", f"store.dir={tmp_path}/{graphs}", *made_small(("method=nkd",)), option)
            run = compose(*options, "optim.max_steps=6", "runtime.log_every=1", f"runtime.graphs={graphs}")
            losses[graphs] = [point["loss"] for point in losses_of(run, "cuda:0", "fp32")]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-5)
    assert [message for message in caplog.messages if reason in message and "run without graphs:" in message]
    assert torch.cuda.current_stream() == stream


def test_a_run_taken_up_within_an_epoch_is_the_same(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, losses = Training.take_update, dict[str, list[float]]()

    def interrupted(training: Training, *arguments: Any) -> None:
        if training.num_steps > 5 and training.history.step == 5:
            raise KeyboardInterrupt
        step(training, *arguments)

    for name in ("whole", "resumed"):
        options = ("method=alp", f"store.dir={tmp_path}/{name}", *made_small(("method=alp",)))
        run = compose(*options, "optim.max_steps=10", "runtime.log_every=1", "runtime.checkpoint_steps=5")
        if name == "resumed":
            monkeypatch.setattr(Training, "take_update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                losses_of(run, "cuda:0", "fp32")
            monkeypatch.setattr(Training, "take_update", step)
        losses[name] = [point["loss"] for point in losses_of(run, "cuda:0", "fp32")]
    assert len(losses["resumed"]) == len(losses["whole"]) - 5 > 0
    assert losses["resumed"] == losses["whole"][5:]
