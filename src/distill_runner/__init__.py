"""distill-run: repeat, compare and extend knowledge distillation of Transformers."""

__version__ = "0.1.0"
