"""Compose: the interface to Hydra, from a command line to a typed run, with errors that a user understands."""
