"""What becomes of a finished student: predictions, ONNX files, their scores and costs, and a folder that serves."""
