"""distill-run: reproduce, compare and extend knowledge distillation of Transformers."""

from distill_runner.common.library_switches import limit_spinning, make_matrix_products_reproducible

__version__ = "0.1.0"

make_matrix_products_reproducible()
limit_spinning()
