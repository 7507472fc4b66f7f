"""Results of runs with the published numbers: rows, tables, figures, model cards."""
