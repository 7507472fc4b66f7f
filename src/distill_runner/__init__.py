"""distill-run: reproduce, compare and extend knowledge distillation of Transformers."""

from distill_runner.common import library_switches

__version__ = "0.1.0"

library_switches.set_early_switches()
