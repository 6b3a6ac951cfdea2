"""RunConfig: everything that decides what a run computes. Where it happens is `launch.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from maskfleet.config.base import Config
from maskfleet.config.model import ModelConfig, Share

ImagesPerGpu = Annotated[int, Field(ge=1, le=256)]


def _rising(values: tuple[float, ...]) -> bool:
    """Whether there are values, each larger than the one before."""
    return bool(values) and all(low < high for low, high in pairwise(values))


class SplitConfig(Config):
    """A COCO-format set named by its two paths."""

    annotations: str
    """Annotation file, absolute or under `data.root`."""

    images: str
    """Folder of the images, absolute or under `data.root`."""


class DataConfig(Config):
    """Which images, and how they are prepared."""

    root: str = "data"
    """Folder that holds annotations/ and the image folders."""

    train: tuple[str | SplitConfig, ...] = ("train2017",)
    """Training sets, joined: names of splits under `data.root`, or two paths each; auto is the one that is there."""

    val: tuple[str | SplitConfig, ...] = ("val2017",)
    """Validation sets, each evaluated by itself; auto is the one that is there; empty for none."""

    train_short_edge_px: tuple[PositiveInt, PositiveInt] = (800, 800)
    """Smallest and largest short side in training; each image draws one in between."""

    test_short_edge_px: PositiveInt = 800
    """Short side in evaluation and prediction."""

    flip_probability: Share = 0.5
    """How often a training image is mirrored."""

    scale_jitter: tuple[PositiveFloat, PositiveFloat] | None = None
    """Large-scale jitter: smallest and largest factor on the image before a crop to the canvas; None for off."""

    color_jitter: Share = 0.0
    """Strength of random brightness, contrast and saturation; 0 for off."""

    filter_empty: bool = True
    """Whether training leaves out images without any object."""

    buckets: Literal["orientation", "tight", "none"] | tuple[tuple[PositiveInt, PositiveInt], ...] = "orientation"
    """Canvas shapes: one each for landscape and portrait, tighter ones, each batch's own, or [height, width] pairs."""

    num_workers: NonNegativeInt | None = None
    """Loader processes a rank; None chooses from the CPU cores, 0 loads in the training process."""

    on_bad: Literal["error", "skip"] = "error"
    """What to do about broken images or annotations: stop before training and list them, or leave them out."""

    cache_dir: str | None = None
    """Folder for the annotation store; None is beside the annotations, or the user's cache if that is read-only."""

    @model_validator(mode="after")
    def _ranges_in_order(self) -> DataConfig:
        for name in ("train_short_edge_px", "scale_jitter"):
            pair = getattr(self, name)
            if pair is not None and pair[0] > pair[1]:
                raise ValueError(f"{name} goes from {pair[0]} down to {pair[1]}; write the smaller one first")
        if not self.train:
            raise ValueError("train is empty; name at least one training set")
        return self


class TrainConfig(Config):
    """How the weights move."""

    seed: NonNegativeInt = 1234
    """Decides initial weights, data order, augmentation and sampling."""

    images_per_gpu: ImagesPerGpu = 1
    """Images in one forward and backward pass of one rank."""

    accumulate_to_images: PositiveInt = 1
    """Gradients of several passes are added up until at least this many images are in an update."""

    base_lr: PositiveFloat = 0.01
    """Learning rate for `base_lr_images` images an update; scaled linearly to the real number."""

    base_lr_images: PositiveInt = 8
    """Images an update for which `base_lr` is meant: 8 in TensorPack, 1 in AWS Samples."""

    warmup_steps: NonNegativeInt = 1000
    """Steps over which the learning rate rises linearly to its full value."""

    warmup_init_lr: float = Field(default=1e-5, ge=0)
    """Where warm-up starts: the rate of the first step is this times 8 / base_lr_images, whatever the batch."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""

    weight_decay: float = Field(default=1e-4, ge=0)
    """Pull towards zero on the kernels of convolutions and fully connected layers; never on biases or norms."""

    step_schedule: tuple[PositiveInt, ...] | None = (120_000, 160_000, 180_000)
    """Steps, counted as if each had 8 images, after which the rate falls tenfold; the last one ends training."""

    epoch_schedule: Literal["auto"] | tuple[tuple[PositiveFloat, PositiveFloat | None], ...] | None = None
    """Pairs [epoch, factor]: after it the rate is factor times the full one, null ends; auto goes by the data."""

    images_per_epoch: PositiveInt | None = None
    """Images that count as one epoch; None is once through the training set."""

    steps_per_epoch: PositiveInt | None = None
    """Steps that count as one epoch, instead of `images_per_epoch`."""

    gradient_clip: float = Field(default=0.0, ge=0)
    """Largest norm of all gradients together; 0 for off."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward and backward pass; auto is bf16 where the GPU has it and fp32 elsewhere."""

    compile: Literal["auto"] | bool = "auto"
    """Whether the step is compiled; auto does it on a GPU, unless data.buckets is none."""

    weights: str | None = None
    """Whole detector to start from, not to resume: a run directory, .npz, .pth or .safetensors file."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep a moving average of the weights with this decay and evaluate that; None for off."""

    target_box_ap: Share | None = None
    """Stop early once box AP on the first validation set reaches this (and the mask target too, if given)."""

    target_mask_ap: Share | None = None
    """Stop early once mask AP on the first validation set reaches this (and the box target too, if given)."""

    log_every_steps: PositiveInt = 20
    """Steps between two lines of metrics; between them nothing is read back from the GPU."""

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainConfig:
        if (self.step_schedule is None) == (self.epoch_schedule is None):
            both = "both are set" if self.step_schedule is not None else "neither is set"
            raise ValueError(f"give the schedule in one unit, step_schedule or epoch_schedule: {both}")
        if self.images_per_epoch is not None and self.steps_per_epoch is not None:
            raise ValueError("images_per_epoch and steps_per_epoch both say how long an epoch is; set only one")
        if self.step_schedule is not None and not _rising(self.step_schedule):
            raise ValueError(f"step_schedule {list(self.step_schedule)} must rise from entry to entry")
        if self.epoch_schedule is not None and self.epoch_schedule != "auto":
            epochs, factors = zip(*self.epoch_schedule, strict=True) if self.epoch_schedule else ((), ())
            if not _rising(epochs):
                raise ValueError(f"epoch_schedule must have rising epochs, not {list(epochs)}")
            if factors[-1] is not None or None in factors[:-1]:
                raise ValueError("epoch_schedule must end with (last epoch, null), and only its last factor is null")
        return self


class EvalConfig(Config):
    """When and how validation happens."""

    every_epochs: NonNegativeInt = 1
    """Epochs between two evaluations; 0 for none, not even at the end."""

    images_per_gpu: ImagesPerGpu = 1
    """Images in one forward pass of one rank."""

    accurate_paste: bool = True
    """Whether masks are put into the image by exact interpolation instead of a rounded resize."""

    max_images: PositiveInt | None = None
    """Evaluate only the first so many images, for a quick look; None is all."""

    show_score_threshold: Share = 0.5
    """Detections drawn in reports and by `maskfleet predict` must score above this."""


class CheckpointConfig(Config):
    """What is kept, so that nothing is lost."""

    every_epochs: NonNegativeInt = 1
    """Epochs between two checkpoints; 0 leaves it to `every_minutes`. The end of training always saves."""

    every_minutes: float | None = Field(default=15.0, gt=0)
    """Minutes between two checkpoints inside an epoch; None for off."""

    keep_last: PositiveInt = 3
    """Newest checkpoints kept."""

    keep_best: bool = True
    """Whether the checkpoint with the best AP so far is kept as well."""


class RunConfig(Config):
    """One training run."""

    recipe: str = "standard"
    """Recipe this run started from."""

    model: ModelConfig = ModelConfig()
    """The network."""

    data: DataConfig = DataConfig()
    """The images."""

    train: TrainConfig = TrainConfig()
    """The optimisation."""

    eval: EvalConfig = EvalConfig()
    """The validation."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints."""

    @model_validator(mode="after")
    def _mask_parts_agree(self) -> RunConfig:
        if not self.model.mask and self.train.target_mask_ap is not None:
            raise ValueError("train.target_mask_ap waits for masks, but model.mask is false; remove one of them")
        return self
