"""What every point of a sweep would import or make first, for the server that points are forked from.

Nothing here may compute with torch: threads that it starts do not live on in a fork.
"""

import sklearn.metrics
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.bert import modeling_bert

from distill_runner import running

__all__ = ["modeling_bert", "running", "sklearn"]

get_checkpoint_conversion_mapping("bert")  # reading a model asks for it, and the table of all types takes a while
