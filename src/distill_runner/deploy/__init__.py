"""Deploying: a finished student as ONNX, checked against torch, and what it costs to run."""
