"""Subcommands of ``distill-run``, such as ``distill-run table``: their options, and what each one does."""
