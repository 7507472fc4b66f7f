"""Deployment of a finished student: export to ONNX or OpenVINO, engines that run it, running costs and the report."""
