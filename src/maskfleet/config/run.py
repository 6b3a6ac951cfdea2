"""RunConfig: everything that decides what a run computes. Where it runs is in `launch.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from maskfleet.config.base import Config
from maskfleet.config.model import ModelConfig, Share

ImagesPerGpu = Annotated[int, Field(ge=1, le=256)]

# Pairs of fields for one setting in two units: setting one clears the other.
_PAIRS = (
    ("train.step_schedule", "train.epoch_schedule"),
    ("train.images_per_epoch", "train.steps_per_epoch"),
    ("train.epochs", "train.steps"),
)
ALTERNATIVES = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


def _rising(values: tuple[float, ...]) -> bool:
    """Whether there are values, in strictly ascending order."""
    return bool(values) and all(low < high for low, high in pairwise(values))


class SplitConfig(Config):
    """A COCO-format set given by its two paths."""

    annotations: str
    """Annotation file, absolute or under `data.root`."""

    images: str
    """Folder of the images, absolute or under `data.root`."""


class DataConfig(Config):
    """The data sets, and how their images are prepared."""

    root: str = "data"
    """Folder with annotations/ and the image folders or shards, or s3://bucket/prefix."""

    train: tuple[str | SplitConfig, ...] = ("train2017",)
    """Training sets, joined: names of splits under `data.root`, or two paths each; auto finds them in `data.root`."""

    val: tuple[str | SplitConfig, ...] = ("val2017",)
    """Validation sets, each evaluated separately; auto finds them in `data.root`; empty for none."""

    train_short_edge_px: tuple[PositiveInt, PositiveInt] = (800, 800)
    """Smallest and largest short side in training; each image gets a random one in this range. One number is both."""

    test_short_edge_px: PositiveInt = 800
    """Short side in evaluation and prediction."""

    flip_probability: Share = 0.5
    """Probability that a training image is flipped horizontally."""

    scale_jitter: tuple[PositiveFloat, PositiveFloat] | None = None
    """Large-scale jitter: smallest and largest scale factor before a crop to the canvas; None for off."""

    color_jitter: Share = 0.0
    """Strength of random brightness, contrast and saturation; 0 for off."""

    filter_empty: bool = True
    """Whether training leaves out images without objects."""

    buckets: Literal["orientation", "tight", "none"] | tuple[tuple[PositiveInt, PositiveInt], ...] = "orientation"
    """Padded image shapes: one per orientation, up to three tight ones, one per batch, or [height, width] pairs."""

    num_workers: NonNegativeInt | None = None
    """Loader processes per rank; None chooses by the CPU cores, 0 loads in the training process."""

    on_bad: Literal["error", "skip"] = "error"
    """How to treat broken images or annotations: list them and stop before training, or leave them out."""

    max_image_mpx: PositiveFloat = 179.0
    """Largest image in million pixels; a larger one is an error before it is decoded, since it may fill the memory."""

    allow_outside: bool = False
    """Whether file names in the annotations may lead out of the image folder, by an absolute path or `..`."""

    cache_dir: str | None = None
    """Folder for annotation stores and data from S3; None is next to the annotations, or the user's cache."""

    cache_gb: NonNegativeFloat = 20.0
    """Largest size of the local cache of images from S3, shared by all ranks of a host; 0 for none."""

    @field_validator("train_short_edge_px", mode="before")
    @classmethod
    def _one_number_is_both(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) else value

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
    """Optimisation: learning rate, schedule, batch size and precision."""

    seed: NonNegativeInt = 1234
    """Seed of initial weights, data order, augmentation and sampling."""

    images_per_gpu: Literal["auto"] | ImagesPerGpu = 1
    """Images in one step of one rank; auto: the fewest within 3 % of the best speed, measured, 2 on the CPU."""

    accumulate_to_images: PositiveInt = 1
    """Gradients are accumulated over steps until an update has at least this many images."""

    base_lr: PositiveFloat = 0.01
    """Learning rate for `base_lr_images` images per update; scaled linearly to the actual number."""

    base_lr_images: PositiveInt = 8
    """Images per update that `base_lr` refers to: 8 in TensorPack, 1 in AWS Samples."""

    warmup_steps: NonNegativeInt = 1000
    """Steps over which the learning rate increases linearly to its full value."""

    warmup_init_lr: float = Field(default=1e-5, ge=0)
    """Start of the warm-up: the first step's rate is this times 8 / base_lr_images, for any batch size."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW, whose `base_lr` is much smaller (1e-4) and `weight_decay` larger (0.05)."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD; of AdamW the decay of the gradient's mean."""

    weight_decay: float = Field(default=1e-4, ge=0)
    """Weight decay of convolution and fully connected kernels; biases and norms have none."""

    epochs: PositiveFloat | None = None
    """Length of training in epochs; the drops of the schedule move in proportion. None: as the schedule says."""

    steps: PositiveInt | None = None
    """Length of training in steps, instead of `epochs`."""

    decay: Literal["steps", "cosine"] = "steps"
    """How the learning rate falls: at the steps of the schedule, or along half a cosine wave to 0 at its end."""

    step_schedule: tuple[PositiveInt, ...] | None = (120_000, 160_000, 180_000)
    """Steps of 8 images after which the rate drops tenfold; the last one ends training."""

    epoch_schedule: Literal["auto"] | tuple[tuple[PositiveFloat, PositiveFloat | None], ...] | None = None
    """Pairs [epoch, factor]: from that epoch the rate is factor times the full one, null ends; auto: by set size."""

    images_per_epoch: PositiveInt | None = None
    """Images per epoch; None is one pass over the training set."""

    steps_per_epoch: PositiveInt | None = None
    """Steps per epoch, instead of `images_per_epoch`."""

    gradient_clip: float = Field(default=0.0, ge=0)
    """Gradients are clipped to this total norm; 0 for off."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; auto is bf16 on GPUs that support it, else fp32."""

    compile: Literal["auto"] | bool = "auto"
    """Whether the step is compiled before the first one; auto compiles on a GPU while the run trains, if it pays."""

    exchange_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which ranks send each other gradients; bf16 halves the traffic and rounds them to 3 digits."""

    weights: str | None = None
    """Detector to start from, not to resume: a run directory, a weights file, or a name of `maskfleet weights list`."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is evaluated and saved; None for off."""

    target_box_ap: Share | None = None
    """Stop early once box AP on the first validation set reaches this (and the mask target too, if given)."""

    target_mask_ap: Share | None = None
    """Stop early once mask AP on the first validation set reaches this (and the box target too, if given)."""

    patience: PositiveInt | None = None
    """Stop early after this many evaluations in a row without a better AP; None for off."""

    join_timeout_s: PositiveFloat = 600.0
    """Seconds that the ranks of a run wait for each other to start."""

    peer_timeout_s: PositiveFloat = 300.0
    """Seconds after which a rank that no longer responds ends the run; before the first step it is half an hour."""

    log_every_steps: PositiveInt = 20
    """Steps between two log lines of metrics; in between nothing is read back from the GPU."""

    @property
    def batch_size(self) -> int:
        """`images_per_gpu`, once a run has replaced auto by a number."""
        assert self.images_per_gpu != "auto"
        return self.images_per_gpu

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainConfig:
        if (self.step_schedule is None) == (self.epoch_schedule is None):
            both = "both are set" if self.step_schedule is not None else "neither is set"
            raise ValueError(f"give the schedule in one unit, step_schedule or epoch_schedule: {both}")
        if self.images_per_epoch is not None and self.steps_per_epoch is not None:
            raise ValueError("images_per_epoch and steps_per_epoch both set the length of an epoch; set only one")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps both set the length of training; set only one")
        if self.step_schedule is not None and not _rising(self.step_schedule):
            raise ValueError(f"step_schedule {list(self.step_schedule)} must be in ascending order")
        if self.epoch_schedule is not None and self.epoch_schedule != "auto":
            epochs, factors = zip(*self.epoch_schedule, strict=True) if self.epoch_schedule else ((), ())
            if not _rising(epochs):
                raise ValueError(f"the epochs of epoch_schedule must be in ascending order, not {list(epochs)}")
            if factors[-1] is not None or None in factors[:-1]:
                raise ValueError("epoch_schedule must end with (last epoch, null), and only its last factor is null")
        return self


class EvalConfig(Config):
    """When and how the model is evaluated."""

    every_epochs: NonNegativeInt = 1
    """Epochs between two evaluations; 0 for none, not even at the end."""

    images_per_gpu: Literal["auto"] | ImagesPerGpu = "auto"
    """Images in one forward pass of one rank; auto is 1 on the CPU, on a GPU up to 16, depending on its memory."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of detection; auto is bf16 on GPUs that support it, else fp32."""

    compile: Literal["auto"] | bool = "auto"
    """Whether detection on a GPU is compiled; auto compiles if the images are enough for that to save time."""

    accurate_paste: bool = True
    """Whether masks are pasted into the image by exact interpolation instead of a rounded resize."""

    max_images: PositiveInt | None = None
    """Evaluate only this many images, the first ones; None is all."""

    show_score_threshold: Share = 0.5
    """Detections drawn in reports and by `maskfleet predict` must score above this."""


class CheckpointConfig(Config):
    """When checkpoints are saved, and which are kept."""

    every_epochs: NonNegativeInt = 1
    """Epochs between two checkpoints; 0 saves by `every_minutes` only. The last step always saves."""

    every_minutes: float | None = Field(default=15.0, gt=0)
    """Minutes between two checkpoints inside an epoch; None for off."""

    keep_last: PositiveInt = 3
    """Number of newest checkpoints that are kept."""

    keep_best: bool = True
    """Whether the checkpoint with the best AP so far is also kept."""


class LogConfig(Config):
    """What the log shows, and who else gets the metrics."""

    all_metrics: bool = False
    """Whether a log line has every metric, as SageMaker's definitions need, instead of losses, speed and time left."""

    wandb: str | None = Field(default=None, min_length=1)
    """Project in Weights & Biases that gets the metrics too; None for off. Needs the extra `wandb`."""

    mlflow: str | None = Field(default=None, min_length=1)
    """Experiment in MLflow that gets the metrics too; None for off. Needs the extra `mlflow`."""


class RunConfig(Config):
    """One training run."""

    recipe: str = "standard"
    """Recipe that this run is based on."""

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

    log: LogConfig = LogConfig()
    """The log."""

    @model_validator(mode="after")
    def _mask_parts_agree(self) -> RunConfig:
        if not self.model.mask and self.train.target_mask_ap is not None:
            raise ValueError("train.target_mask_ap needs masks, but model.mask is false; remove one of them")
        return self
