"""Labels of words: names in text, parts of speech (WNUT-17, CoNLL-2003, exports of annotation tools)."""

from distill_runner.tasks.tokens.task import TokensTask

__all__ = ["TokensTask"]
