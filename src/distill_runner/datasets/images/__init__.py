"""Images: decoded once into an array of bytes, augmented in whole batches."""
