"""Commands: the console scripts other than ``distill-run``."""
