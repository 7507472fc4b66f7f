"""Runs of vectors with the console script: targets, scores, predictions, retrieval, unequal widths, margins."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from scipy.stats import spearmanr

from distill_runner.datasets.tokenization import Examples
from distill_runner.tasks.vectors.texts import TextRows, write_texts
from helpers.command import distill_run
from helpers.sentence_folders import folder_with
from helpers.small_runs import few_fast
from test_vectors_search import beir

WIDTH = 16
TASK = "task=custom_vectors task.dataset=data task.max_length=16 transfer=labeled runtime.device=cpu"
TEACHER = ["teacher=base", "teacher.source=teacher", "teacher.name=tiny", "teacher.fine_tuned=true"]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices("abcdefghij", k=rng.randint(2, 8)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny teacher, and texts and scored pairs of its words."""
    folder, rng = tmp_path_factory.mktemp("vectors"), random.Random(0)
    folder_with(folder / "teacher", {"pooling_mode": "mean"})
    (data := folder / "data").mkdir()
    (data / "train.txt").write_text("".join(f"{sentence(rng)}\n" for _ in range(70)))
    pairs = [f"{sentence(rng)},{sentence(rng)},{rng.random():.3f}" for _ in range(30)]
    (data / "validation.csv").write_text("\n".join(["sentence1,sentence2,label", *pairs]) + "\n")
    return folder


def run(place: Path, *options: str, method: str = "vectors") -> tuple[Path, dict[str, object]]:
    """The folder and the result of a run."""
    steps = "optim.max_steps=4 optim.batch_size=8 student.num_layers=1 runtime.threads=1"
    ended = distill_run(place, *TASK.split(), *TEACHER, *steps.split(), f"method={method}", *options)
    assert ended.code == 0, ended.err
    folder = Path(next(line.split()[-1] for line in ended.out.splitlines() if "folder" in line))
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    return folder, result


def test_a_run_and_its_use(place: Path) -> None:
    folder, result = run(place)
    assert (folder / "model" / "modules.json").is_file()
    (lengths,) = [one["splits"] for one in result["account"] if one["topic"] == "lengths"]  # type: ignore[attr-defined]
    assert lengths["validation"]["examples"] == 60, "each text of a pair is cut for itself"
    card = (folder / "model" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "SentenceTransformer" in card
    texts = place / "texts.txt"
    texts.write_text("a b c\nd e\n")
    for suffix in ("npy", "parquet"):
        ended = distill_run(place, "predict", str(folder), str(texts), "--out", f"vectors.{suffix}", "--device", "cpu")
        assert ended.code == 0, ended.err
    vectors = np.load(place / "vectors.npy")
    assert vectors.shape == (2, WIDTH)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(2), abs=1e-6)
    assert np.array(parquet.read_table(place / "vectors.parquet")["text"].to_pylist()) == pytest.approx(vectors)
    rows = [line.split(",") for line in (place / "data" / "validation.csv").read_text().splitlines()[1:]]
    sides = []
    for column in (0, 1):
        texts.write_text("".join(f"{row[column]}\n" for row in rows))
        distill_run(place, "predict", str(folder), str(texts), "--out", "side.npy", "--device", "cpu")
        sides.append(np.load(place / "side.npy"))
    cosines = (sides[0] * sides[1]).sum(1)
    expected = spearmanr(cosines, [float(row[2]) for row in rows])[0]
    assert result["metrics"]["spearman"] == pytest.approx(expected, abs=1e-6)  # type: ignore[index]
    ended = distill_run(place, "predict", str(folder), str(texts), "--out", "vectors.csv", "--device", "cpu")
    assert "(embeddings) are not written in this format" in ended.err


@pytest.mark.parametrize("outputs", few_fast(["float32", "float16"], 1))
def test_cached_vectors_train_as_live_ones_do(outputs: str, place: Path) -> None:
    models = []
    for targets in ("cached", "live"):
        options = (f"runtime.targets={targets}", f"teacher.outputs={outputs}", f"store.dir=store-{targets}-{outputs}")
        models.append((run(place, *options)[0] / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_vectors_of_a_file_train_as_their_teacher_does(place: Path) -> None:
    """As ``distill-run predict`` writes them: an array for the lines of a text file, a column of lists in a table."""
    models = [(run(place)[0] / "model" / "model.safetensors").read_bytes()]
    texts = (place / "data" / "train.txt").read_text().splitlines()
    ended = distill_run(place, "predict", "teacher", "data/train.txt", "--out", "own.npy", "--device", "cpu")
    assert ended.code == 0, ended.err
    table = pyarrow.table({"text": texts, "own": [*np.load(place / "own.npy")]})
    (place / "table").mkdir()
    parquet.write_table(table, place / "table" / "train.parquet")
    shutil.copy(place / "data" / "validation.csv", place / "table")
    labels = ["teacher=labels", "teacher.fine_tuned=false"]
    for options in (
        ["task.teacher_vectors=own.npy"],
        ["task.dataset=table", "task.teacher_vectors=own", "task.train_columns=text"],
    ):
        models.append((run(place, *labels, *options)[0] / "model" / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]
    np.save(place / "short.npy", np.load(place / "own.npy")[1:])
    ended = distill_run(
        place, *TASK.split(), *TEACHER, *labels, "task.teacher_vectors=short.npy", "student.num_layers=1"
    )
    assert "has 69 vectors of finite numbers, but there are 70 texts" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("widths", ["pca", "project"])
def test_a_narrower_student(widths: str, place: Path) -> None:
    sizes = "{model_type: bert, hidden_size: 8, num_attention_heads: 2, intermediate_size: 16, num_hidden_layers: 1}"
    fresh = ("student.init.source=null", f"student.architecture={sizes}", "student.tokenizer=teacher")
    folder, result = run(place, f"vectors.widths={widths}", *fresh)
    assert result["student"]["width"] == 8  # type: ignore[index]
    assert not list((folder / "model").glob("*Dense*"))


def test_hidden_states_are_pooled_states(place: Path) -> None:
    """ALP's attention over layers compares pooled states, cached like the vectors. No training split is read."""
    mapping = "{rule: all, supervise_last: true}"
    term = f"+method.terms.alp={{term: hidden_states, mapping: {mapping}, combine: attend, distance: mse}}"
    texts = ("task.train=", "transfer=custom", "transfer.parts.inputs.dataset=data")
    folder, _ = run(place, term, "method.weights.vectors=0", "+method.weights.alp=1", *texts)
    assert (folder / "model" / "1_Pooling" / "config.json").is_file()


def test_a_teacher_is_scored_by_retrieval(place: Path) -> None:
    folder = place / "beir"
    folder.mkdir()
    beir(folder)
    options = "task=custom_retrieval task.dataset=beir task.max_length=16 runtime.device=cpu stage=teacher"
    ended = distill_run(place, *options.split(), *TEACHER, "method=vectors", "transfer=labeled")
    assert ended.code == 0, ended.err
    own = ended.out + ended.err
    assert "ndcg_at_10" in own
    rng, width = np.random.default_rng(0), WIDTH
    for size, message in ((width, "ndcg_at_10"), (width + 2, f"the model's have {width}")):
        np.save(place / "documents.npy", rng.normal(size=(3, size)))
        chosen = [*TEACHER, "method=vectors", "transfer=labeled", "task.documents=documents.npy"]
        ended = distill_run(place, *options.split(), *chosen)
        assert message in ended.out + ended.err
        assert ended.out + ended.err != own


def test_a_row_keeps_its_texts_together(place: Path, tmp_path: Path) -> None:
    """Repeated rows too: each has its own texts in the batch, in the order of the columns."""
    from distill_runner.models.sources import resolve_source

    columns = [["a", "b c", "d e f"], ["g h i j", "a", "b"], ["c c c", "d", "e e"]]
    tokenizer = resolve_source(str(place / "teacher")).tokenizer()
    write_texts(tmp_path, Examples(columns, np.array([0.0, 1.0, 2.0], dtype=np.float32)), tokenizer, 16, ["", "", ""])
    batch = TextRows(tmp_path).batch([2, 0, 2])
    assert batch.labels is not None
    assert batch.labels.tolist() == [2.0, 0.0, 2.0]
    assert batch.texts_of_rows is not None
    assert sorted(batch.texts_of_rows.flatten().tolist()) == list(range(9))
    ends = [*batch.starts.tolist()[1:], batch.num_tokens]
    texts = [
        tokenizer.decode(batch.input_ids[a:b], skip_special_tokens=True)
        for a, b in zip(batch.starts, ends, strict=True)
    ]
    found = [[texts[position] for position in row] for row in batch.texts_of_rows.tolist()]
    assert found == [[column[row] for column in columns] for row in (2, 0, 2)]
