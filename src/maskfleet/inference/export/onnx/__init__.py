"""A detector as an ONNX file."""
