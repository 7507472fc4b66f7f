"""Compose: the edge to Hydra, from a command line to a typed run, with errors in a user's words."""
