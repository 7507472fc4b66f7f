"""Datasets: from files to packed batches, and what predictions are worth."""
