"""One run: build, loop, checkpoints, metrics."""
