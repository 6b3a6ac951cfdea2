"""Train Mask R-CNN and Faster R-CNN, from a laptop to a cluster. Importing this package imports no torch."""

__version__ = "0.1.0.dev0"
