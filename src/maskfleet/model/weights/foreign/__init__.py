"""Weights of other programs: pickles read without running them, and Detectron2's names and layouts."""
