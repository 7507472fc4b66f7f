"""Extractive question answering: the answer is a span of the context (SQuAD 1.1 and 2.0, MLQA, similar data)."""

from distill_runner.tasks.questions.task import QuestionsTask

__all__ = ["QuestionsTask"]
