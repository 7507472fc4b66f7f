"""Results beside the published numbers: rows, tables, model cards."""
