"""Experiment tracking: every run writes ``metrics.jsonl``; Weights & Biases and others are optional.

A tracker only observes. If it fails during training (no network, a full disk), the failure is logged once and
training continues. Only a tracker that cannot be opened at all raises an error, before any work is done.
"""
