"""The noise is uniform and independent; the samples follow the rules, whatever the padding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maskfleet.ops.anchors import anchor_keys
from maskfleet.ops.matching import match_rois
from maskfleet.ops.sampling import hash_uniform, sample_rois, subsample_labels

GOLDENS = Path(__file__).parents[1] / "goldens"


def splitmix64(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    word = (word ^ word >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return word ^ word >> 31


def slow_hash_uniform(seed: int, key: int, stream: int) -> float:
    golden, word = 0x9E3779B97F4A7C15, (1 << 64) - 1
    state = splitmix64(seed & word ^ splitmix64((stream + 1) * golden & word))
    return (splitmix64(splitmix64(key * golden & word ^ state) + state & word) >> 40) / 2**24


def chi_square(samples: Tensor, *, bins: int) -> float:
    """Deviations of a histogram of samples in [0, 1) from flatness, in standard deviations of chi-square."""
    counts = torch.histc(samples.double(), bins=bins, min=0, max=1)
    expected = samples.numel() / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1)))


def test_noise_is_what_plain_integers_give() -> None:
    numbers, keys = [0, 1, -7, 2**63 - 1], [0, 1, 2, 10**15, -(2**63)]
    seen = hash_uniform(torch.tensor(numbers), torch.tensor(keys), stream=3)
    assert seen.dtype == torch.float32
    assert seen.tolist() == [[slow_hash_uniform(seed, key, 3) for key in keys] for seed in numbers]


@pytest.mark.parametrize("seed", [0, 1, 12345, -1])
@pytest.mark.parametrize("stream", [0, 1])
def test_noise_is_uniform_over_neighbouring_keys_in_one_and_two_dimensions(seed: int, stream: int) -> None:
    noise = hash_uniform(torch.tensor([seed]), torch.arange(200_000), stream=stream)[0]
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert abs(chi_square(noise, bins=1000)) < 4
    cells = (noise[:-1] * 32).floor() / 32 + noise[1:] / 32  # a neighbour's value inside one's own bin
    assert abs(chi_square(cells, bins=1024)) < 4


def test_noise_is_uniform_over_anchor_keys_and_over_images() -> None:
    keys = anchor_keys(level=2, height=200, width=300, num_anchors=3)
    assert abs(chi_square(hash_uniform(torch.tensor([5]), keys, stream=0)[0], bins=1000)) < 4
    over_images = hash_uniform(torch.arange(100_000), torch.tensor([7]), stream=0)[:, 0]
    assert abs(chi_square(over_images, bins=1000)) < 4


def test_noise_of_another_seed_stream_or_key_is_uncorrelated() -> None:
    keys = torch.arange(100_000)
    rows = [hash_uniform(torch.tensor([0, 1, 2**40]), keys, stream=stream) for stream in (0, 1, 2)]
    rows += [row.roll(1, dims=1) for row in rows]
    correlation = torch.corrcoef(torch.cat(rows).double()) - torch.eye(18, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(100_000)


def test_keys_may_differ_from_image_to_image() -> None:
    keys = torch.tensor([[1, 2, 3], [3, 2, 9]])
    both = hash_uniform(torch.tensor([4, 5]), keys, stream=1)
    for image in range(2):
        alone = hash_uniform(torch.tensor([4 + image]), keys[image], stream=1)
        assert torch.equal(both[image], alone[0])


def draw(seed: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    noise = hash_uniform(seed, keys, stream=2)
    labels = torch.where(noise < 0.1, 1, 0).to(torch.int8)
    return noise, subsample_labels(labels, noise, num_samples=256, positive_fraction=0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.timeout(3600)  # inductor runs a C++ compiler, slowly on a busy machine
def test_compiled_noise_and_samples_have_the_same_bits() -> None:
    seed, keys = torch.tensor([3, -9]), anchor_keys(level=2, height=30, width=40, num_anchors=3)
    for seen, expected in zip(torch.compile(draw, fullgraph=True)(seed, keys), draw(seed, keys), strict=True):
        assert torch.equal(seen, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("compiled", [False, True])
def test_noise_and_samples_on_a_cuda_device_have_the_same_bits(compiled: bool) -> None:
    seed, keys = torch.tensor([3, -9]), anchor_keys(level=2, height=200, width=336, num_anchors=3)
    there = torch.compile(draw, fullgraph=True) if compiled else draw
    for seen, expected in zip(there(seed.cuda(), keys.cuda()), draw(seed, keys), strict=True):
        assert torch.equal(seen.cpu(), expected)


def counts(labels: Tensor) -> list[tuple[int, int]]:
    return [(int((row == 1).sum()), int((row == 0).sum())) for row in labels]


def test_subsampling_keeps_the_least_noise_of_each_kind() -> None:
    labels = torch.tensor([[1, 0, 1, 0, -1, 1, 0, 0]], dtype=torch.int8)
    noise = torch.tensor([[0.9, 0.1, 0.2, 0.8, 0.0, 0.3, 0.5, 0.4]])
    kept = subsample_labels(labels, noise, num_samples=4, positive_fraction=0.5)
    assert kept.dtype == torch.int8
    assert kept.tolist() == [[-1, 0, 1, -1, -1, 1, -1, 0]]


@settings(max_examples=200, deadline=None)
@given(
    labels=st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=40),
    num_samples=st.integers(1, 60),
    fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 5),
    num_values=st.sampled_from([1, 3, 1000]),
)
def test_subsampling_counts_are_the_specs(
    labels: list[int], num_samples: int, fraction: float, seed: int, num_values: int
) -> None:
    before = torch.tensor([labels], dtype=torch.int8)
    noise = torch.randint(0, num_values, before.shape, generator=torch.Generator().manual_seed(seed)) / num_values
    after = subsample_labels(before, noise, num_samples=num_samples, positive_fraction=fraction)
    positives = min(labels.count(1), int(num_samples * fraction))
    assert counts(after) == [(positives, min(labels.count(0), num_samples - positives))]
    assert ((after == before) | (after == -1)).all()
    for kind in (0, 1):
        kept, dropped = noise[(before == kind) & (after == kind)], noise[(before == kind) & (after == -1)]
        assert not len(kept) or not len(dropped) or kept.max() <= dropped.min()


def test_every_negative_is_equally_likely() -> None:
    labels = torch.zeros(4000, 20, dtype=torch.int8)
    noise = hash_uniform(torch.arange(4000), torch.arange(20), stream=0)
    often = (subsample_labels(labels, noise, num_samples=5, positive_fraction=0.5) == 0).sum(dim=0).double()
    assert float(((often - 1000) ** 2).mean().sqrt()) < 3 * math.sqrt(4000 * 0.25 * 0.75)


def test_subsampling_does_not_depend_on_the_canvas_or_the_neighbours() -> None:
    def sampled(height: int, width: int, seed: list[int]) -> Tensor:
        keys = anchor_keys(level=2, height=height, width=width, num_anchors=3)
        labels = torch.full((len(seed), height, width, 3), -1, dtype=torch.int8)
        labels[:, :20, :30] = 0
        labels[:, 5:9, 7:20] = 1
        noise = hash_uniform(torch.tensor(seed), keys, stream=0)
        labels = subsample_labels(labels.flatten(1), noise, num_samples=64, positive_fraction=0.5)
        return labels.reshape(len(seed), height, width, 3)[:, :20, :30]

    alone = sampled(20, 30, [77])[0]
    assert counts(alone.flatten()[None]) == [(32, 32)]
    assert torch.equal(sampled(41, 50, [3, 77, 4])[1], alone)


def test_sampled_rois_are_tensorpacks() -> None:
    with np.load(GOLDENS / "train_fpn_mask_A.npz", allow_pickle=False) as file:
        names = ("proposal_boxes", "gt_boxes", "gt_labels", "sampled_boxes", "sampled_labels")
        proposals, gt, gt_labels, boxes, labels = (torch.from_numpy(file[name]) for name in names)
    rois = torch.cat([proposals, gt])[None]
    valid, gt_valid = torch.ones(1, len(rois[0]), dtype=torch.bool), torch.ones(1, len(gt), dtype=torch.bool)
    best_iou, matched = match_rois(rois, valid, gt[None], gt_valid)
    in_order = torch.arange(len(rois[0]))[None] / 1000  # TensorPack ran without its shuffle
    sampled = sample_rois(
        best_iou, matched, valid, in_order, num_samples=2048, positive_fraction=0.25, foreground_iou=0.5
    )
    assert sampled.valid.all()
    assert torch.equal(rois[0, sampled.index[0]], boxes)
    assert torch.equal(torch.where(sampled.foreground[0], gt_labels[sampled.matched[0]], 0), labels)


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["fg", "bg", "padding"]), min_size=1, max_size=30),
    num_samples=st.integers(1, 40),
    fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    fill=st.booleans(),
    seed=st.integers(0, 5),
)
def test_sampling_counts_order_and_fill_are_the_specs(
    kinds: list[str], num_samples: int, fraction: float, fill: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    best_iou = torch.tensor([[{"fg": 0.5, "bg": 0.4999, "padding": 0.9}[kind] for kind in kinds]])
    valid = torch.tensor([[kind != "padding" for kind in kinds]])
    matched = torch.randint(0, 9, best_iou.shape, generator=generator)
    noise = torch.rand(best_iou.shape, generator=generator)
    sampled = sample_rois(
        best_iou, matched, valid, noise,
        num_samples=num_samples, positive_fraction=fraction, foreground_iou=0.5, fill_with_foreground=fill,
    )  # fmt: skip
    foreground = min(kinds.count("fg"), int(num_samples * fraction))
    background = min(kinds.count("bg"), num_samples - foreground)
    if fill:
        foreground = min(kinds.count("fg"), num_samples - background)
    picked = [kinds[i] for i in sampled.index[0, : foreground + background].tolist()]
    assert picked == ["fg"] * foreground + ["bg"] * background
    slots = min(num_samples, len(kinds))
    taken = foreground + background
    assert sampled.valid.tolist() == [[True] * taken + [False] * (slots - taken)]
    assert sampled.foreground.tolist() == [[True] * foreground + [False] * (slots - foreground)]
    index = sampled.index[0, :taken]
    assert index.unique().numel() == taken
    assert torch.equal(sampled.matched[0, :taken], matched[0, index])
    assert not sampled.index[0, taken:].any()
    assert not sampled.matched[0, taken:].any()


def test_sampled_foreground_has_the_least_noise() -> None:
    best_iou = torch.tensor([[0.9, 0.8, 0.7, 0.1, 0.2, 0.3]])
    noise = torch.tensor([[0.5, 0.1, 0.3, 0.9, 0.0, 0.2]])
    sampled = sample_rois(
        best_iou, torch.zeros(1, 6, dtype=torch.int64), torch.ones(1, 6, dtype=torch.bool), noise,
        num_samples=4, positive_fraction=0.5, foreground_iou=0.5,
    )  # fmt: skip
    assert sampled.index.tolist() == [[1, 2, 4, 5]]


def test_sampling_an_image_does_not_depend_on_its_padding_or_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    best_iou, matched = torch.rand(1, 50, generator=generator), torch.arange(50)[None] % 7
    rules: dict[str, Any] = {"num_samples": 16, "positive_fraction": 0.25, "foreground_iou": 0.5}
    noise = hash_uniform(torch.tensor([9]), torch.arange(50), stream=4)
    alone = sample_rois(best_iou, matched, torch.ones(1, 50, dtype=torch.bool), noise, **rules)
    padded_iou = torch.cat([best_iou, torch.rand(1, 14, generator=generator)], dim=1)
    both_iou = torch.cat([torch.rand(1, 64, generator=generator), padded_iou])
    valid = torch.ones(2, 64, dtype=torch.bool)
    valid[1, 50:] = False
    both = sample_rois(
        both_iou, torch.arange(64).expand(2, 64) % 7, valid,
        hash_uniform(torch.tensor([2, 9]), torch.arange(64), stream=4), **rules,
    )  # fmt: skip
    assert torch.equal(both.index[1], alone.index[0])
    assert torch.equal(both.matched[1], alone.matched[0])
    assert torch.equal(both.foreground[1], alone.foreground[0])


def test_every_function_is_one_graph() -> None:
    def draw(seed: Tensor, best_iou: Tensor) -> tuple[Tensor, ...]:
        noise = hash_uniform(seed, torch.arange(best_iou.shape[1]), stream=0)
        labels = subsample_labels((best_iou > 0.5).to(torch.int8), noise, num_samples=8, positive_fraction=0.5)
        sampled = sample_rois(
            best_iou, torch.zeros_like(best_iou, dtype=torch.int64), best_iou > 0.1, noise,
            num_samples=8, positive_fraction=0.25, foreground_iou=0.5, fill_with_foreground=True,
        )  # fmt: skip
        return noise, labels, sampled.index, sampled.foreground, sampled.valid, sampled.matched

    seed, best_iou = torch.tensor([1, 2]), torch.rand(2, 30, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    for seen, expected in zip(compiled(seed, best_iou), draw(seed, best_iou), strict=True):
        assert torch.equal(seen, expected)
