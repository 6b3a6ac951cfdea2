"""Train Mask R-CNN and Faster R-CNN, from a laptop to a cluster.

    import maskfleet

    result = maskfleet.train(maskfleet.recipe("scratch", {"data.root": "data"}), "runs/mine")
    detector = maskfleet.load("runs/mine")
    found = detector.detect("photo.jpg", score=0.5)

Importing this package imports no torch, numpy or OpenCV: the functions are imported when they are first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maskfleet.config.load import recipe_with as recipe
    from maskfleet.errors import MaskfleetError
    from maskfleet.evaluation.evaluate import Evaluation, evaluate
    from maskfleet.inference.detections import ImageDetections
    from maskfleet.inference.detector import Detector
    from maskfleet.inference.load import load
    from maskfleet.training.start import TrainingResult, train

__version__ = "0.1.0.dev0"

__all__ = [
    "Detector",
    "Evaluation",
    "ImageDetections",
    "MaskfleetError",
    "TrainingResult",
    "__version__",
    "evaluate",
    "load",
    "recipe",
    "train",
]

_DEFINED_IN = {
    "Detector": ("maskfleet.inference.detector", "Detector"),
    "Evaluation": ("maskfleet.evaluation.evaluate", "Evaluation"),
    "ImageDetections": ("maskfleet.inference.detections", "ImageDetections"),
    "MaskfleetError": ("maskfleet.errors", "MaskfleetError"),
    "TrainingResult": ("maskfleet.training.start", "TrainingResult"),
    "evaluate": ("maskfleet.evaluation.evaluate", "evaluate"),
    "load": ("maskfleet.inference.load", "load"),
    "recipe": ("maskfleet.config.load", "recipe_with"),
    "train": ("maskfleet.training.start", "train"),
}

if not TYPE_CHECKING:  # with a module __getattr__, type checkers would accept every name

    def __getattr__(name: str) -> object:
        if name not in _DEFINED_IN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module, attribute = _DEFINED_IN[name]
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
