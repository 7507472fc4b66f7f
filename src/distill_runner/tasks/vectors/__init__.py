"""Vectors of texts: scored by the similarity of pairs (STS-B), or by retrieval in the layout of BEIR."""

from distill_runner.tasks.vectors.retrieval import RetrievalTask
from distill_runner.tasks.vectors.task import EmbeddingsTask

__all__ = ["EmbeddingsTask", "RetrievalTask"]
