"""Compiling the step in child processes while the run already trains eagerly."""
