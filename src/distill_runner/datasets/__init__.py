"""Datasets: readers of files, batches of examples, and metrics of predictions."""
