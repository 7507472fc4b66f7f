"""Models: builds encoders and reads their features. No other package knows attribute names of ``transformers``."""
