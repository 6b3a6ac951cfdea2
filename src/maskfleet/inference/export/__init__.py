"""A detector as a file for other programs."""
