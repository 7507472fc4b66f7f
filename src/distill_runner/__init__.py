"""distill-run: reproduce, compare and extend knowledge distillation of Transformers."""

from distill_runner.common import library_switches

__version__ = "0.1.0"

library_switches.make_matrix_products_reproducible()
library_switches.limit_spinning()
library_switches.load_weights_without_threads()
library_switches.quiet_launcher_warning()
