"""TensorPack npz, torchvision state dicts and our own safetensors <-> our state dict."""

from maskfleet.model.weights.content import file_config, file_content
from maskfleet.model.weights.files import Labels, WeightsFile, labels_of, read_file, save_tensorpack, save_weights
from maskfleet.model.weights.guess import describe, dialect_of, guess_config
from maskfleet.model.weights.load import compare, fit, load_weights
from maskfleet.model.weights.report import LoadReport
from maskfleet.model.weights.shapes import class_layers, expected_shapes

__all__ = [
    "Labels",
    "LoadReport",
    "WeightsFile",
    "class_layers",
    "compare",
    "describe",
    "dialect_of",
    "expected_shapes",
    "file_config",
    "file_content",
    "fit",
    "guess_config",
    "labels_of",
    "load_weights",
    "read_file",
    "save_tensorpack",
    "save_weights",
]
