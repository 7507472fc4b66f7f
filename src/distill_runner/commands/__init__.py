"""Commands: the console scripts beside ``distill-run``."""
