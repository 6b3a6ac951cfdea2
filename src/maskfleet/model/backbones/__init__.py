"""Backbones: each is a module with its channels and strides."""
