"""Sweeps: grids of points, each run in a separate process; the same command resumes an unfinished sweep."""
