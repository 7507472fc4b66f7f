"""Imports that every point of a sweep needs, made once in the server from which the points are forked.

No code here may compute with torch: threads that torch starts do not survive a fork.
"""

from distill_runner.common.library_switches import scan_transformers_once
from distill_runner.common.process import fast_imports

with fast_imports():
    scan_transformers_once()
    import sklearn.metrics
    from transformers import conversion_mapping
    from transformers.models.bert import modeling_bert

    from distill_runner import running

    conversion_mapping.get_checkpoint_conversion_mapping("bert")  # slow the first time; needed to load any model

__all__ = ["modeling_bert", "running", "sklearn"]
