"""Retrieval: an independent ranking and its scores, and folders in BEIR's layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.deploy.folder import ModelFolder
from distill_runner.tasks import make_task
from distill_runner.tasks.split_account import data_line
from distill_runner.tasks.vectors.retrieval import Judgments, nearest, query_scores
from distill_runner.tasks.vectors.task import pair_similarities

Relevance = dict[int, dict[int, int]]
Scores = dict[str, list[float]]


def reference(queries: np.ndarray, documents: np.ndarray, relevance: Relevance, excluded: np.ndarray) -> Scores:
    """The scores as trec_eval's manual defines them, one query after the other, in plain Python."""
    scores: Scores = {"ndcg_at_10": [], "mrr_at_10": [], "recall_at_100": []}
    for query, judged in sorted(relevance.items()):
        relevant = {d: r for d, r in judged.items() if r > 0 and d != excluded[query]}
        if not any(r > 0 for r in judged.values()):
            continue
        values = []
        for number, document in enumerate(documents):
            norm = math.dist(queries[query], 0 * queries[query]) * math.dist(document, 0 * document)
            values.append((-float(queries[query] @ document) / norm, number))
        ranking = [number for _, number in sorted(values) if number != excluded[query]]
        gain = sum(judged.get(d, 0) / math.log2(i + 2) for i, d in enumerate(ranking[:10]) if judged.get(d, 0) > 0)
        best = sum(r / math.log2(i + 2) for i, r in enumerate(sorted(relevant.values(), reverse=True)[:10]))
        hits = [i for i, d in enumerate(ranking[:10]) if judged.get(d, 0) > 0]
        scores["ndcg_at_10"].append(gain / best if best else 0.0)
        scores["mrr_at_10"].append(1 / (hits[0] + 1) if hits else 0.0)
        scores["recall_at_100"].append(sum(d in relevant for d in ranking[:100]) / max(len(relevant), 1))
    return scores


@given(st.integers(1, 4), st.integers(1, 250), st.integers(0, 999))
@settings(deadline=None, max_examples=25)
def test_scores_are_those_of_a_plain_ranking(num_queries: int, num_documents: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries, documents = rng.normal(size=(num_queries, 5)), rng.normal(size=(num_documents, 5))
    relevance: Relevance = {}
    for query in range(num_queries):
        chosen = rng.choice(num_documents, rng.integers(1, min(20, num_documents) + 1), replace=False)
        relevance[query] = {int(document): int(rng.integers(0, 4)) for document in chosen}
    excluded = rng.integers(-1, num_documents, size=num_queries)
    triples = [(q, d, r) for q, judged in relevance.items() for d, r in judged.items()]
    judgments = Judgments(np.array(triples), excluded)
    expected = reference(queries, documents, relevance, excluded)
    if not expected["ndcg_at_10"]:
        return
    own = query_scores(queries, documents, judgments)
    for name, values in expected.items():
        assert own[name] == pytest.approx(np.array(values), abs=1e-9), name


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_are_those_of_their_definition(similarity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks; sentence-transformers negates the distances too."""
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(7, 5)), rng.normal(size=(60, 5)) * rng.uniform(0.1, 9, size=(60, 1))
    by_name: dict[str, Any] = {
        "cosine": lambda q, d: q @ d / math.sqrt((q @ q) * (d @ d)),
        "dot": lambda q, d: q @ d,
        "euclidean": lambda q, d: -math.dist(q, d),
        "manhattan": lambda q, d: -sum(abs(q - d)),
    }
    expected = np.array([[by_name[similarity](q, d) for d in documents] for q in queries])
    monkeypatch.setattr("distill_runner.tasks.vectors.retrieval.COSINES_AT_ONCE", 130)
    assert (nearest(queries, documents, 60, similarity) == np.argsort(-expected, axis=1, kind="stable")).all()
    pairs = pair_similarities(queries, documents[:7], similarity)
    assert pairs == pytest.approx(np.diag(expected[:, :7]), abs=1e-12)


def test_blocks_do_not_change_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(5, 4)), rng.normal(size=(23, 4))
    documents[7] = documents[3]  # equal documents stay in order
    expected = nearest(queries, documents, 9)
    for cosines in (1, 23, 50):
        monkeypatch.setattr("distill_runner.tasks.vectors.retrieval.COSINES_AT_ONCE", cosines)
        assert (nearest(queries, documents, 9) == expected).all()
    products = queries @ (documents / np.linalg.norm(documents, axis=1, keepdims=True)).T
    assert (np.argsort(-products.round(6), axis=1, kind="stable")[:, :9] == expected).all()


def beir(folder: Path, rows: str = "q1\td1\t1\nq2\td3\t2\n") -> Path:
    """A folder in BEIR's layout."""
    documents = [("d1", "A title", "one text"), ("d2", "", "two"), ("d3", "Third", "three")]
    lines = [json.dumps({"_id": key, "title": title, "text": text}) for key, title, text in documents]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    queries = [{"_id": f"q{number}", "text": f"query {number}"} for number in (1, 2, 3)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    (folder / "qrels").mkdir()
    (folder / "qrels" / "dev.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def retrieval(folder: Path) -> Any:
    fields = {"name": "search", "dataset": str(folder), "validation": {"validation": "dev"}, "max_length": 16}
    return make_task(type="retrieval", epochs=1, metrics=["ndcg_at_10"], test={"test": "test?"}, **fields).resolved()


def test_titles_and_ids_are_read_and_documents_are_searched_by_design(tmp_path: Path) -> None:
    """The account said that titles were not read, and that the queries' documents were training data too."""
    task = retrieval(beir(tmp_path))
    with recorded_tables() as tables:
        account = task.account("corpus", task.examples("corpus"), tables)
    assert (account.texts, account.unread) == (["title", "text"], [])
    assert task.hashes(task.examples("corpus"), None) is None


def test_queries_search_documents_of_a_file(wordpiece: Any, tmp_path: Path) -> None:
    """Queries of a small model, documents of a large one."""
    own = retrieval(beir(tmp_path))
    rng = np.random.default_rng(0)
    outputs, documents = rng.normal(size=(5, 4)), rng.normal(size=(3, 4)).astype(np.float32)
    np.save(tmp_path / "documents.npy", documents)
    task = own.model_copy(update={"documents": str(tmp_path / "documents.npy")})
    assert task.spec() != own.spec()
    task.write(tmp_path, examples := task.examples("dev"), wordpiece)
    split = task.open(tmp_path)
    expected = query_scores(outputs[:2], documents, examples.judgments)
    assert task.score(outputs, split) == {"ndcg_at_10": expected["ndcg_at_10"].mean()}
    assert task.score(outputs, split) != own.score(outputs, split)
    np.save(tmp_path / "documents.npy", documents[1:])
    with pytest.raises(UserError, match="has 2 vectors of finite numbers, but there are 3 texts"):
        task.check_outputs(4)


def test_a_folder_in_beir_s_layout(tmp_path: Path) -> None:
    task = retrieval(beir(tmp_path))
    examples = task.examples("dev")
    assert examples.texts == [["query 1", "query 2", "A title one text", "two", "Third three"]]
    assert examples.num_queries == 2
    assert examples.judgments.relevance.tolist() == [[0, 0, 1], [1, 2, 2]]
    assert task.examples("corpus").texts == [["A title one text", "two", "Third three"]]
    assert task.test == {}
    with pytest.raises(UserError, match=r"has no file qrels/test\.tsv\n.*It has: dev\. "):
        task.examples("test")
    before = task.spec()["content"]
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    assert retrieval(tmp_path).spec()["content"] != before


def test_judgments_of_missing_texts_are_left_out_and_said(tmp_path: Path) -> None:
    task = retrieval(beir(tmp_path, "q1\td1\t1\nq1\td9\t1\nq9\td1\t1\nq2\td3\t2\n"))
    examples = task.examples("dev")
    assert examples.judgments.relevance.tolist() == [[0, 0, 1], [1, 2, 2]]
    expected = "dev: 2 judgments of queries or documents that the files lack, left out"
    assert task.account("dev", examples, []).warnings == [expected]
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td3\t0\n")
    expected = "dev: 1 of 2 queries without a relevant document left out, which trec_eval counts as 0"
    assert task.account("dev", task.examples("dev"), []).warnings == [expected]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("q1\td9\t1\nq9\td1\t1\n", "names no relevant document: .* for 2 judgments"),
        ("q1\td1\tyes\n", "the relevance 'yes', which is no whole number"),
        ("q1\td1\t0.5\n", "the relevance '0.5', which is no whole number"),
        ("q1\td1\tnan\n", "the relevance 'nan', which is no whole number"),
        ("q1\td1\t1\nq1\td1\t0\n", "judges document 'd1' twice for query 'q1', and not the same"),
        ("q1\td1\t0\nq2\td1\t-1\n", "names no relevant document"),
    ],
)
def test_a_judgment_of_nothing_is_refused(rows: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        retrieval(beir(tmp_path, rows)).examples("dev")


def test_two_documents_of_one_id_are_refused(tmp_path: Path) -> None:
    """The judgments would go to the last one, and the first would count as wrong."""
    folder = beir(tmp_path)
    with (folder / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "d1", "text": "again"}) + "\n")
    with pytest.raises(UserError, match=r"corpus.jsonl has the _id 'd1' twice"):
        retrieval(folder).examples("dev")


def test_judgments_are_no_texts_to_train_on(tmp_path: Path) -> None:
    """The run said that it was trained on qrels/train.tsv, and had read the whole corpus."""
    folder = beir(tmp_path)
    fields = {"name": "search", "dataset": str(folder), "validation": {"validation": "dev"}, "max_length": 16}
    for key, value in (("train", "dev"), ("train", "queries"), ("config", "fr")):
        with pytest.raises(UserError, match=f"task.{key}={value}: "):
            make_task(type="retrieval", epochs=1, metrics=["ndcg_at_10"], **fields | {key: value})


@pytest.mark.parametrize(("title", "text"), [("NaN", '"one"'), ('"one"', "null"), ("null", '"one"')])
def test_a_missing_title_or_text_is_no_word(title: str, text: str, tmp_path: Path) -> None:
    folder = beir(tmp_path)
    (folder / "corpus.jsonl").write_text(
        f'{{"_id": "d1", "title": {title}, "text": {text}}}\n{{"_id": "d3", "text": "b"}}\n'
    )
    assert retrieval(folder).examples("corpus").texts[0][0] == "one"
    (folder / "corpus.jsonl").write_text('{"_id": "d1", "text": ["a", "b"]}\n')
    with pytest.raises(UserError, match=r"corpus.jsonl has a list instead of a text in row 0"):
        retrieval(folder).examples("corpus")


def judged_pairs(**fields: Any) -> Any:
    task = make_task(type="embeddings", **fields).resolved()
    return task.examples(task.validation["validation"])


def test_scores_are_required_where_pairs_are_judged(tmp_path: Path) -> None:
    """A validation part of the training split is judged by its scores, although training texts need none."""
    (tmp_path / "pairs.csv").write_text("a,b,score\n" + "".join(f"x{n},y{n},{n % 5}\n" for n in range(20)))
    fields: dict[str, Any] = {"name": "own", "dataset": str(tmp_path / "pairs.csv"), "max_length": 8, "split_off": 0.2}
    fields |= {"epochs": 1, "metrics": ["spearman"], "columns": ["a", "b"]}
    with pytest.raises(UserError, match=r"task.label=label: "):
        judged_pairs(**fields)
    task = make_task(type="embeddings", label="score", train_columns=["a"], **fields).resolved()
    judged = task.examples(task.validation["validation"])
    assert len(judged.texts) == 2
    assert judged.labels is not None
    assert len(task.examples(task.train).texts) == 1
    splits = (task.train, *task.validation.values())
    accounts = {split: task.account(split, task.examples(split), []) for split in splits}
    assert data_line(accounts, {}, "text").text.endswith("; text = a, evaluated on a + b")


def test_an_answer_with_the_id_of_its_question_is_refused(tmp_path: Path) -> None:
    """BEIR leaves such a document out: all scores of data numbered alike were 0."""
    folder = beir(tmp_path, "d1\td1\t0\nd1\td2\t1\n")
    (folder / "queries.jsonl").write_text('{"_id": "d1", "text": "a query"}\n')
    assert len(retrieval(folder).examples("dev").texts) == 1, "judged as not relevant"
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nd1\td1\t1\n")
    with pytest.raises(UserError, match="judges document 'd1' for the query of the same id"):
        retrieval(folder).examples("dev")


def test_a_file_does_not_say_whether_its_texts_are_queries(tmp_path: Path) -> None:
    """It was looked for in BEIR's layout, and a folder in that layout is no file."""
    student = ModelFolder("run", tmp_path, retrieval(beir(tmp_path)))
    (tmp_path / "texts.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"queries and documents, and a file does not say which it holds\n.*encodes"):
        student.predict_file(tmp_path / "texts.txt", "cpu")
