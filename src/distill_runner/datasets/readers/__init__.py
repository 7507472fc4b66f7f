"""Readers of datasets: from a local file or folder, from the hub or embedded, to a table of columns."""
