"""Distillation methods: one file per paper, one protocol (``base``)."""
