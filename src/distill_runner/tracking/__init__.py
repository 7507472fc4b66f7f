"""What a run reports while it trains: ``metrics.jsonl`` always, Weights & Biases or TensorBoard by choice.

A tracker is an observer. Whatever happens to it during training (no network, a full disk) is logged once, and
the training goes on; only a tracker that cannot be opened at all is an error, before any work is done.
"""

from distill_runner.tracking.metrics_file import MetricsFile
from distill_runner.tracking.observe import OPTIONAL, open_tracker, track_sweep
from distill_runner.tracking.tracker import Tracker, TrackerConfig, Values, flat

__all__ = ["OPTIONAL", "MetricsFile", "Tracker", "TrackerConfig", "Values", "flat", "open_tracker", "track_sweep"]
