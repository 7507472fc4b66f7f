"""Extractive questions: the answer is a piece of the context (SQuAD 1.1 and 2.0, MLQA, and data of their shape)."""

from distill_runner.kinds.questions.task import QuestionsTask

__all__ = ["QuestionsTask"]
