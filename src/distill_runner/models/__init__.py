"""Models: builds encoders and reads their features. No other room knows attribute names of ``transformers``."""
