"""A file's tensors under our names and in our layout, independent of a particular network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from maskfleet.config.base import replaced
from maskfleet.config.model import ModelConfig
from maskfleet.errors import WeightsError
from maskfleet.model.heads.fpn import BOX_RESOLUTION
from maskfleet.model.weights import tensorpack, torchvision
from maskfleet.model.weights.files import WeightsFile
from maskfleet.model.weights.foreign import detectron2
from maskfleet.model.weights.guess import OUR_NAME, Dialect, dialect_of, guess_config
from maskfleet.model.weights.shapes import Scope

Source = Literal["auto", "tensorpack", "aws", "torchvision", "detectron2", "maskfleet"]

KINDS: dict[Source, str] = {
    "tensorpack": "TensorPack",
    "aws": "AWS Samples",
    "torchvision": "torchvision",
    "detectron2": "Detectron2",
    "maskfleet": "maskfleet",
}
AWS_SETTINGS = {
    "roi_align": "aws",
    "loss_mean_over": "batch",
    "box_head.box_loss": "huber",
    "box_head.fill_with_foreground": True,
}
"""How the AWS Samples model differs; its weights do not show it."""

LEGACY_SETTINGS = {"rpn.legacy_anchors": True, "box_head.box_loss": "huber"}
"""What TensorPack computed until May 2019; weights of that time are right only with it."""

_LEGACY_FILE = re.compile(r"COCO-.*(Standard|BetterParams|ScratchGN)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Content:
    """Tensors under our names (the last ResNet group in the backbone), and the rest of the file."""

    source: Source  # never "auto"
    tensors: dict[str, Tensor]
    file_names: dict[str, str]  # our name -> the file's
    unexpected: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def file_content(file: WeightsFile, *, source: Source = "auto", num_categories: int | None = None) -> Content:
    """What `file` holds, in our terms; `num_categories` decides whether unused COCO rows of torchvision go."""
    dialect = _checked_dialect(file, source)
    content = _renamed(file, dialect, source=dialect if source == "auto" else source)
    match content.source:
        case "tensorpack" | "aws":
            _to_our_layout(content)
        case "torchvision":
            content.notes.extend(torchvision.to_our_terms(content.tensors, num_categories=num_categories))
        case "detectron2":
            content.notes.extend(detectron2.to_our_terms(content.tensors, file.tensors, file.author))
    return content


def file_config(file: WeightsFile, *, source: Source = "auto", legacy_2018: bool = False) -> ModelConfig | None:
    """The configuration of a file: the one stored in it, or the one its shapes, source and age imply."""
    config = file.config or guess_config({name: tuple(tensor.shape) for name, tensor in file.tensors.items()})
    if config is None:
        return None
    settings = (AWS_SETTINGS if source == "aws" else {}) | (LEGACY_SETTINGS if legacy_2018 else {})
    if _is_msra(file):
        settings |= detectron2.MSRA_SETTINGS
    return replaced(config, settings)


def advice(file: WeightsFile, content: Content, config: ModelConfig, scope: Scope) -> Iterator[str]:
    """What `config` computes otherwise than the network did that these weights are from."""
    if scope == "all" and _LEGACY_FILE.match(file.path.name) and not config.rpn.legacy_anchors:
        yield (
            f"{file.path.name} is named like TensorPack's weights of 2018, whose anchors were rounded: "
            "set model.rpn.legacy_anchors=true and model.box_head.box_loss=huber (or --legacy-2018)"
        )
    if _is_msra(file) and not config.backbone.stride_1x1:
        yield (
            "Detectron2's network has the strides in the first 1x1 convolutions of its groups: "
            "set model.backbone.stride_1x1=true"
        )
    usual = ModelConfig()
    same = (config.pixel_mean_rgb, config.pixel_std_rgb) == (usual.pixel_mean_rgb, usual.pixel_std_rgb)
    if not same and content.source != "maskfleet":
        yield (
            f"the model scales pixels in its own way, and {KINDS[content.source]}'s weights expect "
            f"model.pixel_mean_rgb={list(usual.pixel_mean_rgb)} and model.pixel_std_rgb={list(usual.pixel_std_rgb)}"
        )


def _is_msra(file: WeightsFile) -> bool:
    is_detectron2 = file.config is None and dialect_of(file.tensors) == "detectron2"
    return is_detectron2 and detectron2.starts_from_msra(file.tensors, file.author)


def _checked_dialect(file: WeightsFile, source: Source) -> Dialect:
    is_ours = file.config is not None and file.container == "safetensors"  # an .npz of ours has TensorPack's names
    dialect = "maskfleet" if is_ours else dialect_of(file.tensors)
    if dialect is None:
        example = ", ".join(sorted(file.tensors)[:3]) or "nothing"
        raise WeightsError(
            f"{file.path} holds tensors of a network we do not know ({example}, …)",
            remedy="give TensorPack, AWS Samples, torchvision (resnet50, maskrcnn_resnet50_fpn), Detectron2 or "
            "maskfleet weights",
        )
    expected = "tensorpack" if source == "aws" else source
    if expected not in ("auto", dialect):
        raise WeightsError(
            f"{file.path} was said to come from {KINDS[source]}, but its names are {KINDS[dialect]}'s",
            remedy="leave out --from, or name the right one",
        )
    return dialect


def _renamed(file: WeightsFile, dialect: Dialect, *, source: Source) -> Content:
    content = Content(source, {}, {}, ignored=dict(file.ignored))
    for file_name, tensor in file.tensors.items():
        # Reasons first: a summary such as EMA/rpn/class/W would pass for a tensor of the network.
        reason = _ignored_reason(file_name, dialect)
        ours = OUR_NAME[dialect](file_name)
        if reason is not None:
            content.ignored[file_name] = reason
        elif ours is None:
            content.unexpected.append(file_name)
        elif ours in content.tensors:
            raise WeightsError(
                f"{file.path} has two tensors for {ours}: {content.file_names[ours]} and {file_name}",
                remedy="remove the one that does not belong there",
            )
        else:
            content.tensors[ours] = tensor
            content.file_names[ours] = file_name
    return content


def _ignored_reason(file_name: str, dialect: Dialect) -> str | None:
    """Why an entry is rightly left out; None if there is no such reason."""
    match dialect:
        case "tensorpack":
            return tensorpack.ignored_reason(file_name)
        case "torchvision":
            return torchvision.ignored_reason(file_name)
        case "detectron2":
            return detectron2.ignored_reason(file_name)
        case "maskfleet":
            return None


def _to_our_layout(content: Content) -> None:
    is_aws = content.source == "aws"
    for name, theirs in content.tensors.items():
        tensor = tensorpack.from_npz(theirs)
        if is_aws and name.endswith(".fc6.weight") and tensor.ndim == 2 and tensor.shape[1] % BOX_RESOLUTION**2 == 0:
            tensor = tensorpack.rows_from_aws(tensor)
            content.notes.append("rows of fc6 reordered from AWS Samples' (y, x, channel) to (channel, y, x)")
        content.tensors[name] = tensor
    if not is_aws and "box_heads.0.fc6.weight" in content.tensors:
        content.notes.append(
            "AWS Samples (its TensorFlow 2 code) uses the same names with fc6's rows in another order, "
            "which no file shows: if it is from there, say --from aws"
        )
