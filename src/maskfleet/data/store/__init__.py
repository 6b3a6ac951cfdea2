"""Annotation files as flat, memory-mapped columns."""
