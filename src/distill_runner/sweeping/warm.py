"""What every point of a sweep would import or make first, for the server that points are forked from.

Nothing here may compute with torch: threads that it starts do not live on in a fork.
"""

import sklearn.metrics
from transformers import conversion_mapping
from transformers.models.bert import modeling_bert

__all__ = ["modeling_bert", "sklearn"]

conversion_mapping.get_checkpoint_conversion_mapping("bert")  # asked for by each model that is read, and slow at first
