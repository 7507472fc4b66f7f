"""distill-run: repeat, compare and extend knowledge distillation of Transformers."""

import os

__version__ = "0.1.0"

# With AVX-512, MKL divides long sums among its threads if matrices are small. Outputs would then depend on the number
# of threads and on the number of texts in a batch. MKL reads this variable at its first matrix product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
