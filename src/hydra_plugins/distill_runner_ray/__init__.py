"""The Ray launcher of distill-run, found by Hydra through the namespace package ``hydra_plugins``."""
