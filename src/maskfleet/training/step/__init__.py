"""One training step: eager, or compiled and recorded as a CUDA graph."""
