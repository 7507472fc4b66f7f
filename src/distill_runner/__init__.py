"""distill-run: repeat, compare and extend knowledge distillation of Transformers."""

import os

__version__ = "0.1.0"

# With AVX-512, MKL divides long sums among its threads where matrices are small, and outputs would depend on how many
# threads there are and on how many texts share a batch. MKL reads this at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
