"""Datasets: reading files, building batches and computing the metrics of predictions."""
