"""Loads a weights file into a model; if something does not fit, an error says what, and what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maskfleet.config.model import ModelConfig
from maskfleet.errors import WeightsError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.weights import torchvision
from maskfleet.model.weights.content import KINDS, Content, Source, advice, file_config, file_content
from maskfleet.model.weights.files import WeightsFile, read_file
from maskfleet.model.weights.foreign import detectron2
from maskfleet.model.weights.guess import describe
from maskfleet.model.weights.report import LoadReport
from maskfleet.model.weights.shapes import Scope, Shape, class_layers, expected_shapes, in_model, scope_of

OnClassMismatch = Literal["error", "reinit"]


@dataclass(frozen=True, slots=True)
class Fit:
    """The tensors of a file that go into a model, under the model's names, and a report of all others."""

    tensors: dict[str, Tensor]
    report: LoadReport


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    path: str | Path,
    *,
    scope: Scope = "all",
    source: Source = "auto",
    on_class_mismatch: OnClassMismatch = "error",
) -> LoadReport:
    """Fill `model`, built from `config`, from a weights file; nothing is written before everything has been checked.

    With scope "backbone" only the ResNet is filled. With "reinit", layers that depend on the number of classes keep
    their initial values if the file has another number.
    """
    fitted = fit(read_file(Path(path)), config, scope=scope, source=source, on_class_mismatch=on_class_mismatch)
    state = model.state_dict()
    assert set(expected_shapes(config)) == set(state), "the model was not built from this configuration"
    with torch.no_grad():
        for name, tensor in fitted.tensors.items():
            state[name].copy_(tensor)
    return fitted.report


def fit(
    file: WeightsFile,
    config: ModelConfig,
    *,
    scope: Scope = "all",
    source: Source = "auto",
    on_class_mismatch: OnClassMismatch = "error",
) -> Fit:
    """The tensors of `file` for a model of `config`, as finite float32; an error if they are another model's."""
    expected = expected_shapes(config, scope)
    content = file_content(file, source=source, num_categories=config.num_categories)
    fitted = compare(file, content, config, scope=scope)
    report = fitted.report
    by_class = class_layers(config) if scope == "all" else frozenset()
    bad_shapes = set(report.other_shape) - by_class
    may_lack = _optional(report, config) if on_class_mismatch == "reinit" else frozenset()
    # Tensors may be left over because the file's network is deeper than, or otherwise unlike, the model.
    is_other = report.unexpected and _differences(file_config(file), config, scope)
    if bad_shapes or set(report.missing) - may_lack or is_other:
        raise _misfit(file, report, config, scope)
    if report.other_shape and on_class_mismatch == "error":
        raise _class_mismatch(file, report, config)
    assert set(fitted.tensors) | set(report.missing) | set(report.other_shape) == set(expected)
    return fitted


def whole_state(
    file: WeightsFile, config: ModelConfig, *, source: Source = "auto", reinit_heads: bool = False
) -> tuple[dict[str, Tensor], LoadReport]:
    """Every tensor of `config`'s network from `file`; the ResNet alone if the number of classes is unknown.

    With `reinit_heads`, layers that the file has for another number of classes, or a mask head that it lacks, get
    new random values, always the same ones.
    """
    mismatch: OnClassMismatch = "reinit" if reinit_heads else "error"
    fitted = fit(file, config, scope=scope_of(config), source=source, on_class_mismatch=mismatch)
    if fitted.report.complete:
        return fitted.tensors, fitted.report
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = build_mask_rcnn(config).state_dict()
    return fresh | fitted.tensors, fitted.report


def compare(file: WeightsFile, content: Content, config: ModelConfig, *, scope: Scope = "all") -> Fit:
    """Compare a file with a network, whether it fits or not; an error only for values that no network can use."""
    expected = expected_shapes(config, scope)
    tensors: dict[str, Tensor] = {}
    other_shape: dict[str, tuple[Shape, Shape]] = {}
    converted, ignored = {}, dict(content.ignored)
    unexpected = list(content.unexpected)
    for ours, tensor in content.tensors.items():
        name, file_name = in_model(ours, config), content.file_names[ours]
        if name not in expected:
            reason = _why_left_out(ours, config, scope)
            if reason is None:
                unexpected.append(file_name)
            else:
                ignored[file_name] = reason
        elif tuple(tensor.shape) != expected[name]:
            other_shape[name] = (tuple(tensor.shape), expected[name])
        else:
            tensors[name] = _checked(tensor, file_name, file.path)
            if tensor.dtype != torch.float32:
                converted[name] = f"stored as {str(tensor.dtype).removeprefix('torch.')}"
    report = LoadReport(
        file=str(file.path),
        kind=f"{KINDS[content.source]} {file.container}",
        matched=tuple(tensors),
        missing=tuple(name for name in expected if name not in tensors and name not in other_shape),
        unexpected=tuple(unexpected),
        ignored=ignored,
        other_shape=other_shape,
        converted=converted,
        notes=(*content.notes, *advice(file, content, config, scope)),
    )
    return Fit(tensors, report)


def _why_left_out(ours: str, config: ModelConfig, scope: Scope) -> str | None:
    if scope == "backbone" and not ours.startswith("backbone."):
        return "only the backbone is loaded"
    if ours.startswith("mask_head.") and not config.mask:
        return "the model has no mask head"
    return None


def _checked(tensor: Tensor, file_name: str, path: Path) -> Tensor:
    """`tensor` as float32, or an error if it has other than finite floating-point numbers."""
    if not tensor.is_floating_point():
        raise WeightsError(
            f"{path}: {file_name} has {str(tensor.dtype).removeprefix('torch.')} numbers, which weights never have",
            remedy="convert the original floating-point weights; quantised ones cannot be used",
        )
    ours = tensor.float().contiguous()
    low, high = ours.aminmax()  # NaN if any is, and without a second tensor as large as the first
    if not (low.isfinite() and high.isfinite()):
        bad = int((~ours.isfinite()).sum())
        raise WeightsError(
            f"{path}: {file_name} has {bad} of {ours.numel()} values that are NaN, infinite or too large for float32",
            remedy="take an earlier checkpoint: the training that wrote this one had diverged",
        )
    return ours


def _optional(report: LoadReport, config: ModelConfig) -> frozenset[str]:
    """What may stay at its initial values when heads are re-initialised: a mask head that the file lacks altogether."""
    mask = [name for name in expected_shapes(config) if name.startswith("mask_head.")]
    return frozenset(mask) if set(mask) <= set(report.missing) else frozenset()


def _differences(theirs: ModelConfig | None, config: ModelConfig, scope: Scope) -> dict[str, Any]:
    """The fields in which the file's network is not the model's, with the file's values."""
    if theirs is None:
        return {}
    fields = ["backbone.kind", "backbone.blocks", "backbone.stem_channels", "backbone.norm"]
    if scope == "all" and theirs.num_categories is not None:
        fields += _detector_fields(theirs)
    if not config.mask:
        fields = [path for path in fields if not path.startswith("mask")]  # an extra mask head is ignored
    changed = {path: value for path in fields if (value := attrgetter(path)(theirs)) != attrgetter(path)(config)}
    if {theirs.backbone.norm, config.backbone.norm} == {"FreezeBN", "SyncBN"}:
        del changed["backbone.norm"]  # the same tensors, trained differently
    return changed


def _detector_fields(config: ModelConfig) -> list[str]:
    """The fields, other than those of the backbone, that the weights of `config` depend on."""
    fields = ["architecture", "mask", "cascade"]
    if config.mask:
        fields.append("mask_head.channels")
    if config.architecture == "c4":
        return [*fields, "rpn.head_channels"]
    fields += ["fpn.channels", "fpn.norm", "box_head.kind", "box_head.fc_channels"]
    if config.box_head.kind != "2fc":
        fields.append("box_head.conv_channels")
    return [*fields, "mask_head.kind"] if config.mask else fields


def _misfit(file: WeightsFile, report: LoadReport, config: ModelConfig, scope: Scope) -> WeightsError:
    theirs = file_config(file)
    if scope == "all" and torchvision.is_second_version(file.tensors):
        return WeightsError(
            f"{file.path} is a …_fpn_v2 detector, whose pyramid and heads have batch norm; ours do not",
            remedy=f"use maskrcnn_resnet50_fpn without v2, or its ResNet alone: model.backbone.weights={file.path}",
        )
    if scope == "all" and detectron2.is_detectron2(file.tensors) and detectron2.has_norm_in_heads(file.tensors):
        return WeightsError(
            f"{file.path} is a detector of Detectron2 whose heads normalize before the ReLU; ours do so after it",
            remedy=f"use its ResNet alone: model.backbone.weights={file.path}",
        )
    counts = [(len(report.missing), "are missing"), (len(report.other_shape), "have another shape")]
    counts.append((len(report.unexpected), "are left over"))
    trouble = ", ".join(f"{count} tensors {what}" for count, what in counts if count)
    example = next(iter([*report.other_shape, *report.missing, *report.unexpected]))
    if theirs is None:
        what = f"{file.path} fits no network of ours: {trouble} (first {example})"
        return WeightsError(what, remedy="use a ResNet with bottleneck blocks of the usual widths, or set the widths")
    what = (
        f"{file.path} looks like {describe(theirs)}, and the model is {describe(config)}: {trouble} (first {example})"
    )
    if scope == "all" and theirs.num_categories is None:
        return WeightsError(what, remedy=f"load it as the backbone alone: model.backbone.weights={file.path}")
    changes = _differences(theirs, config, scope)
    if not changes:
        return WeightsError(what, remedy="the file lacks a part of its own network; download or convert it again")
    if set(changes) == {"mask"} and config.mask:
        return WeightsError(what, remedy="set model.mask=false, or start with a fresh mask head: --reinit-heads")
    settings = " ".join(f"--set model.{path}={_spelled(value)}" for path, value in changes.items())
    return WeightsError(what, remedy=f"use weights for that model, or build the file's: {settings}")


def _class_mismatch(file: WeightsFile, report: LoadReport, config: ModelConfig) -> WeightsError:
    theirs = file_config(file)
    count = "another number of" if theirs is None else theirs.num_categories
    return WeightsError(
        f"{file.path} was trained for {count} classes and the model has {config.num_categories}: "
        f"{', '.join(report.other_shape)} differ in shape",
        remedy="keep all other weights and start these layers afresh (--reinit-heads, on_class_mismatch='reinit')"
        + ("" if theirs is None else f", or set model.num_categories={theirs.num_categories}"),
    )


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
