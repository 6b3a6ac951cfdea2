"""The files of a run by its handle: list, copy, fetch."""
