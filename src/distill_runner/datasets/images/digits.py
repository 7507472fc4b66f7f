"""Handwritten digits that are part of scikit-learn: 1,797 grey images of 8 x 8 pixels, for trials without a download.

Source: UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998), its test part.
"""

import hashlib
import io
from functools import lru_cache

import numpy as np
from PIL import Image

SHARES = {"train": 0.7, "validation": 0.85, "test": 1.0}


@lru_cache(maxsize=1)
def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images (N, 8, 8), uint8, and digits (N,) by split; the assignment to splits is random, but fixed."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = np.rint(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(images))
    cuts = [round(share * len(images)) for share in SHARES.values()]
    parts = np.split(order, cuts[:-1])
    return {name: (images[np.sort(part)], labels[np.sort(part)]) for name, part in zip(SHARES, parts, strict=True)}


def digits_fingerprint() -> str:
    """Return a hash of the images, the labels and their assignment to splits."""
    total = hashlib.sha256()
    for name, (images, labels) in digits().items():
        total.update(name.encode() + images.tobytes() + labels.tobytes())
    return total.hexdigest()


def as_png() -> dict[str, tuple[list[bytes], list[int]]]:
    """Return the digits as a data set stores them: PNG bytes and labels by split."""
    return {name: (list(map(_png, images)), labels.tolist()) for name, (images, labels) in digits().items()}


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
