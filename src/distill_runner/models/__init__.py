"""Models: build encoders and read features of them. The only room that knows attribute names of ``transformers``."""
