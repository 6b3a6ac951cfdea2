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
    from maskfleet.data.get.source import stage_data
    from maskfleet.data.stage.status import staging_status as data_status
    from maskfleet.errors import MaskfleetError
    from maskfleet.evaluation.comparison import Comparison
    from maskfleet.evaluation.evaluate import Evaluation, evaluate
    from maskfleet.inference.detections import ImageDetections
    from maskfleet.inference.detector import Detector
    from maskfleet.inference.load import load
    from maskfleet.infra.images.newest import newest_image
    from maskfleet.launch.api.jobs import LaunchedJob, PreparedJob, prepare_job
    from maskfleet.training.output.compare import compare
    from maskfleet.training.start import TrainingResult, train

__version__ = "0.1.0.dev0"

__all__ = [
    "Comparison",
    "Detector",
    "Evaluation",
    "ImageDetections",
    "LaunchedJob",
    "MaskfleetError",
    "PreparedJob",
    "TrainingResult",
    "__version__",
    "compare",
    "data_status",
    "evaluate",
    "load",
    "newest_image",
    "prepare_job",
    "recipe",
    "stage_data",
    "train",
]

_DEFINED_IN = {
    "Comparison": ("maskfleet.evaluation.comparison", "Comparison"),
    "Detector": ("maskfleet.inference.detector", "Detector"),
    "Evaluation": ("maskfleet.evaluation.evaluate", "Evaluation"),
    "ImageDetections": ("maskfleet.inference.detections", "ImageDetections"),
    "LaunchedJob": ("maskfleet.launch.api.jobs", "LaunchedJob"),
    "MaskfleetError": ("maskfleet.errors", "MaskfleetError"),
    "PreparedJob": ("maskfleet.launch.api.jobs", "PreparedJob"),
    "TrainingResult": ("maskfleet.training.start", "TrainingResult"),
    "compare": ("maskfleet.training.output.compare", "compare"),
    "data_status": ("maskfleet.data.stage.status", "staging_status"),
    "evaluate": ("maskfleet.evaluation.evaluate", "evaluate"),
    "load": ("maskfleet.inference.load", "load"),
    "newest_image": ("maskfleet.infra.images.newest", "newest_image"),
    "prepare_job": ("maskfleet.launch.api.jobs", "prepare_job"),
    "recipe": ("maskfleet.config.load", "recipe_with"),
    "stage_data": ("maskfleet.data.get.source", "stage_data"),
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
