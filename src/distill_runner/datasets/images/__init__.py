"""Images: decoded once into an array of bytes, and augmented batch by batch."""
