"""Retrieval in the layout of BEIR: ``queries.jsonl``, ``corpus.jsonl`` and ``qrels/<split>.tsv`` in one folder.

The search is exact, by cosine or ``task.similarity``. Its scores are nDCG, reciprocal rank and recall, as
trec_eval defines them.

Shapes: Q queries, D documents, vectors of C numbers, the first K documents of a ranking.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from distill_runner.common.errors import UserError, format_typed, override, quantity
from distill_runner.common.files import file_sha256, typed_path
from distill_runner.datasets.metrics import require_finite
from distill_runner.datasets.readers.content import read_table
from distill_runner.datasets.readers.table import TableRecord, is_missing, text_of
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.config import Similarity
from distill_runner.tasks.columns import numbers
from distill_runner.tasks.split_account import SplitAccount
from distill_runner.tasks.task_splits import NO_SPLIT, OPTIONAL, TaskSplits
from distill_runner.tasks.vectors.task import CHARACTERS, VECTOR_REMEDY, VectorTask, read_vectors

if TYPE_CHECKING:
    from distill_runner.models.vectors import SentenceFolder

CORPUS, QUERIES, QRELS = "corpus", "queries", "qrels"
ID, TEXT, TITLE = "_id", "text", "title"
QUERY_ID, DOCUMENT_ID, RELEVANCE = "query-id", "corpus-id", "score"
RANKING_METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
DISTANCES = {"euclidean": "euclidean", "manhattan": "cityblock"}
"""Similarities that are negative distances, with the names of scipy."""
COSINES_AT_ONCE = 2**24
"""Cosines that are computed at once: 64 MiB."""
DEPTH = 100
"""Documents of a ranking that are kept; one more is searched, since a document may be left out."""
LAYOUT = "A folder in BEIR's layout has queries.jsonl, corpus.jsonl and qrels/<split>.tsv."


@dataclass(frozen=True)
class Judgments:
    """Relevant documents of each query.

    Attributes:
        relevance: (M, 3), number of the query, number of the document, and relevance.
        excluded: (Q,), number of the document that is left out of a query's ranking, as BEIR does with a document that
            has the id of the query; -1 if there is none.
    """

    relevance: np.ndarray
    excluded: np.ndarray


@dataclass(frozen=True)
class RetrievalExamples(Examples):
    """Queries, then documents, as single texts.

    Attributes:
        num_queries: number of queries.
        judgments: which documents are relevant; None for training texts.
        num_missing: number of judgments that are left out, since the queries or documents are not in the files.
    """

    num_queries: int = 0
    judgments: Judgments | None = None
    num_missing: int = 0


class RetrievalTask(VectorTask):
    """Search for the documents that are relevant to a query, by the cosine of their vectors with the query's.

    The training split is ``corpus``, the texts of the documents, unless a transfer set has other texts. The title of a
    document is put before its text.

    Attributes:
        prompt: text that is put before each document, and before the texts of a transfer set; null takes the prompt
            ``document`` of the model's folder, else none.
        query_prompt: text that is put before each query; null takes the prompt ``query`` of the model's folder.
        dataset: a folder in BEIR's layout.
        documents: a ``.npy`` file with the vectors (D, C) of ``corpus`` from a larger model: only queries are those of
            the model that is scored. null compares them with its own documents.
    """

    metric_names = RANKING_METRICS
    example_fields = VectorTask.example_fields | {"query_prompt"}
    inferred_fields: ClassVar[tuple[str, ...]] = (*VectorTask.inferred_fields, "query_prompt")

    has_split_files: ClassVar[bool] = False
    label_columns: ClassVar[list[str]] = []
    optional_columns: ClassVar[list[str]] = [TITLE]
    unread_files: ClassVar[str] = "its student reads queries and documents, and a file does not say which it holds"

    type: Literal["retrieval"] = "retrieval"
    label: str = ""
    query_prompt: str | None = None
    documents: str | None = None
    train: str = CORPUS

    @property
    def prompts(self) -> dict[str, str]:
        return {"document": self.prompt or "", "query": self.query_prompt or ""}

    def _values_of(self, folder: "SentenceFolder | None") -> dict[str, str]:
        """Return the fields of prompts as ``encode_query`` and ``encode_document`` take them from a folder."""
        prompts = folder.prompts if folder else {}
        return {"prompt": prompts.get("document", ""), "query_prompt": prompts.get("query", "")}

    @model_validator(mode="after")
    def _trains_on_documents(self) -> Self:
        if self.train not in (CORPUS, NO_SPLIT):
            remedy = "For the texts of the documents: " + override("task.train", "corpus")
            raise UserError("task.train", self.train, "holds judgments, and no texts to train on", remedy)
        if self.prediction_columns:
            problem = "documents have no columns of vectors, only a .npy file"
            raise UserError(self.prediction_key, format_typed(self.prediction_columns), problem, VECTOR_REMEDY)
        if self.config is not None:
            raise UserError("task.config", self.config, "a folder in BEIR's layout has none", "Name the folder itself.")
        return self

    def spec(self) -> dict[str, Any]:
        file = self.documents and typed_path(self.documents)
        return super().spec() | ({"documents": file_sha256(file)} if file and file.is_file() else {})

    def check_outputs(self, num_outputs: int) -> None:
        if self.documents and (width := self.document_vectors(len(self._texts(CORPUS))).shape[1]) != num_outputs:
            problem = f"has vectors of {width} numbers, the model's have {num_outputs}"
            raise UserError("task.documents", self.documents, problem, "Take a model of the same width.")

    def document_vectors(self, count: int) -> np.ndarray:
        """Return the vectors of ``documents``, of which there are ``count``."""
        return read_vectors("task.documents", typed_path(self.documents or ""), count)

    def served_prompt(self) -> str:
        if (self.prompt or "") != (self.query_prompt or ""):
            problem = f"differs from task.prompt={self.prompt or ''!r}, and serve.py cannot tell queries from documents"
            remedy = "Take one prompt for both, or a sweep without a frontier."
            raise UserError("task.query_prompt", repr(self.query_prompt), problem, remedy)
        return super().served_prompt()

    def resolved(self) -> Self:
        return TaskSplits.resolved(self).model_copy(update={"columns": [TEXT]})

    def has_files(self, split: str) -> bool:
        return self._file(split).is_file()

    def fingerprint(self) -> str:
        """Return a hash of the names, bytes and encoding of the files that the splits in use read."""
        total = hashlib.sha256((self.encoding or "").encode())
        for split in sorted({CORPUS, QUERIES, *(split for split in self.splits if not split.endswith(OPTIONAL))}):
            total.update(f"{split}\0{file_sha256(self._existing(split))}\n".encode())
        return f"sha256:{total.hexdigest()}"

    def _file(self, split: str) -> Path:
        return Path(self.dataset) / (f"{split}.jsonl" if split in (CORPUS, QUERIES) else f"{QRELS}/{split}.tsv")

    def _existing(self, split: str) -> Path:
        """Return the file of a split.

        Raises:
            UserError: there is none.
        """
        file = self._file(split)
        if not file.is_file():
            others = sorted(other.stem for other in file.parent.glob("*.tsv")) if file.parent.name == QRELS else []
            remedy = LAYOUT
            if others:
                remedy = f"It has: {', '.join(others)}. " + override(self.split_key(split), others[0])
            raise UserError("task.dataset", self.dataset, f"has no file {file.relative_to(self.dataset)}", remedy)
        return file

    def _columns(self, split: str, columns: list[str]) -> dict[str, list[Any]]:
        """Return the columns of a split's file, with titles if there are any."""
        source = self.model_copy(update={"dataset": str(self._existing(split)), "columns": columns})
        return read_table(source, "train").columns  # the name that a single file has

    def examples(self, split: str) -> RetrievalExamples:
        documents = self._texts(CORPUS)
        if split == self.train:
            return RetrievalExamples([list(documents.values())], None)
        queries, table = self._texts(QUERIES), self._columns(split, [QUERY_ID, DOCUMENT_ID, RELEVANCE])
        gains, num_missing = dict[tuple[str, str], int](), 0
        ids, values = (map(str, table[QUERY_ID]), map(str, table[DOCUMENT_ID])), table[RELEVANCE]
        for query, document, value, relevance in zip(*ids, values, numbers(values).tolist(), strict=True):
            if query not in queries or document not in documents:
                num_missing += 1
                continue
            problem = remedy = ""
            if not relevance.is_integer():
                problem = f"has the relevance {value!r}, which is no whole number"
                remedy = "Grades are 0 for no relevance, or 1 and above."
            elif gains.setdefault((query, document), int(relevance)) != relevance:
                problem = f"judges document '{document}' twice for query '{query}', and not the same"
                remedy = "Keep one of the two judgments."
            elif query == document and relevance > 0:
                problem = f"judges document '{document}' for the query of the same id, which BEIR leaves out"
                remedy = "Remove it, or where they are two texts, give them other ids."
            if problem:
                raise UserError(self.split_key(split), split, f"{self._file(split).name} {problem}", remedy)
        if not any(relevance > 0 for relevance in gains.values()):
            problem = f"{self._file(split).name} names no relevant document: no score is above 0"
            problem += f", or the files lack the texts, as for {num_missing:,} judgments" if num_missing else ""
            raise UserError(self.split_key(split), split, problem, LAYOUT)
        # Other splits have other queries.
        number = {query: number for number, query in enumerate(dict.fromkeys(query for query, _ in gains))}
        place = {document: place for place, document in enumerate(documents)}
        rows = [(number[query], place[document], relevance) for (query, document), relevance in gains.items()]
        judgments = Judgments(np.array(rows), np.array([place.get(query, -1) for query in number]))
        texts = [*(queries[query] for query in number), *documents.values()]
        return RetrievalExamples([texts], None, num_queries=len(number), judgments=judgments, num_missing=num_missing)

    def hashes(self, examples: Any, folder: Path | None) -> np.ndarray | None:
        is_corpus = isinstance(examples, RetrievalExamples) and examples.judgments is None
        return None if is_corpus else super().hashes(examples, folder)  # whose documents are searched by design

    def account(self, split: str, examples: Any, tables: Sequence[TableRecord]) -> SplitAccount:
        account = super().account(split, examples, tables)
        account.texts = [name for name in (TITLE, TEXT) if name in (*account.texts, *account.unread)]
        account.unread = [name for name in account.unread if name not in (ID, TITLE)]
        if count := getattr(examples, "num_missing", 0):
            what = quantity(count, "judgment", ",")
            account.warnings.append(f"{split}: {what} of queries or documents that the files lack, left out")
        if (judgments := getattr(examples, "judgments", None)) is not None:
            served = {query for query, _, gain in judgments.relevance.tolist() if gain > 0}
            what = "without a relevant document left out, which trec_eval counts as 0"
            counts = f"{examples.num_queries - len(served):,} of {examples.num_queries:,} queries"
            if len(served) < examples.num_queries:
                account.warnings.append(f"{split}: {counts} {what}")
        return account

    def _texts(self, split: str) -> dict[str, str]:
        """Return the texts of queries or documents by id.

        Raises:
            UserError: two have the same id.
        """
        table, name = self._columns(split, [ID, TEXT]), self._file(split).name
        titles = table.get(TITLE) or [""] * len(table[ID])
        texts = dict[str, str]()
        for row, (key, *parts) in enumerate(zip(map(str, table[ID]), titles, table[TEXT], strict=True)):
            try:
                text = " ".join("" if is_missing(part) else text_of(part) for part in parts).strip()
            except ValueError as error:
                raise UserError("task.dataset", self.dataset, f"{name} has {error} in row {row}", LAYOUT) from error
            if key in texts:
                problem = f"{name} has the {ID} '{key}' twice"
                raise UserError("task.dataset", self.dataset, problem, "Give each text its own, or remove repetitions.")
            texts[key] = text
        return texts

    def text_prompts(self, examples: Examples) -> list[str]:
        count = examples.num_queries if isinstance(examples, RetrievalExamples) else 0
        return [self.query_prompt or ""] * count + [self.prompt or ""] * (len(examples) - count)

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> int:
        if (judgments := getattr(examples, "judgments", None)) is not None:
            np.savez(folder / "judgments.npz", relevance=judgments.relevance, excluded=judgments.excluded)
        return super().write(folder, examples, tokenizer)

    def open(self, folder: Path, views: int | None = None) -> Any:
        split = super().open(folder, views)
        if (folder / "judgments.npz").exists():
            arrays = np.load(folder / "judgments.npz")
            split.labels = None
            split.judgments = Judgments(arrays["relevance"], arrays["excluded"])
        return split

    def has_labels(self, name: str, split: Any) -> bool:
        return getattr(split, "judgments", None) is not None

    def query_scores(self, outputs: np.ndarray, split: Any) -> Mapping[str, np.ndarray]:
        """Return the metrics of each query that has a relevant document."""
        count = len(split.judgments.excluded)
        documents = self.document_vectors(len(outputs) - count) if self.documents else outputs[count:]
        return query_scores(outputs[:count], documents, split.judgments, self.similarity or "cosine")

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        scores = self.query_scores(outputs, split)
        return {name: float(scores[name].mean()) for name in self.metrics}

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the scores of each query; paired tests resample queries."""
        scores = {f"score-{name}": values for name, values in self.query_scores(outputs, split).items()}
        arrays: dict[str, Any] = {**scores, "clusters": np.arange(len(next(iter(scores.values()))))}
        np.savez(file, **arrays)

    def example_texts(self, name: str, split: Any, numbers: Any) -> list[str]:
        texts = self.examples(name).texts[0]
        return [texts[number][:CHARACTERS] for number in numbers]

    def required_columns(self, split: str) -> dict[str, str]:
        return dict.fromkeys(self.columns, "columns")


def nearest(
    queries_QC: np.ndarray, documents_DC: np.ndarray, count: int, similarity: Similarity = "cosine"
) -> np.ndarray:
    """Return the numbers of the nearest documents of each query, best first, (Q, K).

    Every document is compared. Of equal similarities, the document with the smaller number comes first.
    """
    from scipy.spatial.distance import cdist

    sides = []
    for array in (queries_QC, documents_DC):
        require_finite(array)
        vectors = np.asarray(array, dtype=np.float32)
        if similarity == "cosine":
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
        sides.append(vectors)
    size = max(1, COSINES_AT_ONCE // len(documents_DC))
    blocks = (sides[0][first : first + size] for first in range(0, len(queries_QC), size))
    if similarity in DISTANCES:
        parts = (-cdist(block, sides[1], DISTANCES[similarity]) for block in blocks)
    else:
        parts = (block @ sides[1].T for block in blocks)
    return np.concatenate([np.argsort(-part, axis=1, kind="stable")[:, :count] for part in parts])


def query_scores(
    queries_QC: np.ndarray, documents_DC: np.ndarray, judgments: Judgments, similarity: Similarity = "cosine"
) -> Mapping[str, np.ndarray]:
    """Return the ``RANKING_METRICS`` of each query with a relevant document, in order.

    Gains of nDCG are the relevances themselves, as in trec_eval; the ideal ranking has all judged documents.
    """
    gains_of_query: dict[int, dict[int, int]] = {}
    for query, document, relevance in judgments.relevance.tolist():
        if relevance > 0:
            gains_of_query.setdefault(query, {})[document] = relevance
    rows, scores = sorted(gains_of_query), []
    rankings = nearest(queries_QC[rows], documents_DC, DEPTH + 1, similarity).tolist()
    for query, ranking in zip(rows, rankings, strict=True):
        gain_of, excluded = gains_of_query[query], judgments.excluded[query]
        gain_of.pop(int(excluded), None)
        scores.append(ranking_scores(gain_of, [document for document in ranking if document != excluded][:DEPTH]))
    return {name: np.array([own[name] for own in scores]) for name in RANKING_METRICS}


def ranking_scores(gain_of: Mapping[Any, int], ranking: Sequence[Any]) -> dict[str, float]:
    """Return the scores of a query's ranking, best document first, as trec_eval defines them.

    They are ``ndcg_at_10``, ``mrr_at_10``, ``recall_at_100``; and of all its documents, ``ndcg``, ``map``, ``mrr``.

    Args:
        gain_of: relevance of documents; those of 0 or less are not relevant.
    """
    relevant = {document: gain for document, gain in gain_of.items() if gain > 0}
    gains = [relevant.get(document, 0) for document in ranking]
    hits, ideal = np.flatnonzero(gains), sorted(relevant.values(), reverse=True)
    first = int(hits[0]) + 1 if len(hits) else 0
    total = max(len(relevant), 1)

    def ndcg(depth: int | None) -> float:
        return _discounted_gain(gains[:depth]) / _discounted_gain(ideal[:depth]) if ideal else 0.0

    return {
        "ndcg_at_10": ndcg(10),
        "mrr_at_10": 1 / first if 0 < first <= 10 else 0.0,
        "recall_at_100": int((hits < 100).sum()) / total,
        "ndcg": ndcg(None),
        "map": float((np.arange(1, len(hits) + 1) / (hits + 1)).sum()) / total,
        "mrr": 1 / first if first else 0.0,
    }


def _discounted_gain(gains: list[int]) -> float:
    """Return the gains of a ranking, each divided by the base-2 logarithm of its rank + 1, summed."""
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains, start=1) if gain)
