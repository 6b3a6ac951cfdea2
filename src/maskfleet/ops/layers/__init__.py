"""Layers of the network as functions: convolutions and normalisation, with GPU kernels where they help."""
