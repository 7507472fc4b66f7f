"""What every point of a sweep would import or make first, for the server that points are forked from.

Nothing here may compute with torch: threads that it starts do not live on in a fork.
"""

from distill_runner.common.imports import importing

with importing():
    import sklearn.metrics
    from transformers import conversion_mapping
    from transformers.models.bert import modeling_bert

    from distill_runner import running

    conversion_mapping.get_checkpoint_conversion_mapping("bert")  # asked for by each model that is read, slow at first

__all__ = ["modeling_bert", "running", "sklearn"]
