"""Normalisation against slow formulas; batch statistics over images and ranks."""

from __future__ import annotations

from pathlib import Path

import golden
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: see maskfleet.training.distributed
import torch.multiprocessing as mp
from small import small_batch, small_model
from torch import Tensor

from maskfleet.model.canvas import Area, canvas_of
from maskfleet.model.norm import BatchNorm, Conv, ConvNorm, GroupNorm, share_statistics

MAPS = [(5, 7), (8, 3)]


def padded_maps(channels: int) -> tuple[list[Tensor], Tensor, Area]:
    """Maps of different sizes, the same on one canvas with garbage around them, and their area."""
    torch.manual_seed(0)
    maps = [torch.randn(1, channels, height, width) * 2 + 1 for height, width in MAPS]
    together = torch.full((2, channels, 9, 8), 7.0)
    for place, one in enumerate(maps):
        together[place, :, : one.shape[2], : one.shape[3]] = one[0]
    canvas = canvas_of(torch.tensor(MAPS), height=9, width=8, divisor=1, learning=True)
    return maps, together, canvas.areas[1]


def test_group_norm_is_theirs():
    expected = golden.golden("ops_layers")
    norm = GroupNorm(expected["gn_x"].shape[1])
    norm.weight.data = torch.from_numpy(golden.weight("t/gn/gamma", norm.weight.shape))
    norm.bias.data = torch.from_numpy(golden.weight("t/gn/beta", norm.bias.shape))
    np.testing.assert_allclose(norm(torch.from_numpy(expected["gn_x"])).detach(), expected["gn_y"], atol=1e-5)


def test_deconvolution_is_theirs():
    expected = golden.golden("ops_layers")
    kernel = golden.to_torch(golden.weight("t/deconv/W", (2, 2, 4, 8)), "t/deconv/W")
    bias = torch.from_numpy(golden.weight("t/deconv/b", (4,)))
    ours = torch.nn.functional.conv_transpose2d(torch.from_numpy(expected["deconv_x"]), kernel, bias, stride=2)
    np.testing.assert_allclose(ours, expected["deconv_y"], atol=1e-5)


def test_group_norm_on_a_shared_canvas_sees_each_map_alone():
    maps, together, area = padded_maps(8)
    norm = GroupNorm(8)
    torch.nn.init.normal_(norm.weight)
    normal = norm(together, area)
    for place, one in enumerate(maps):
        height, width = one.shape[2:]
        torch.testing.assert_close(normal[place : place + 1, :, :height, :width], norm(one), rtol=1e-5, atol=1e-5)


def test_batch_statistics_weigh_each_image_alike_whatever_its_size():
    maps, together, area = padded_maps(3)
    norm = BatchNorm(3, learns_statistics=True)
    normal = norm(together, area)
    mean = torch.stack([one.mean(dim=(0, 2, 3)) for one in maps]).mean(dim=0)
    mean_square = torch.stack([one.square().mean(dim=(0, 2, 3)) for one in maps]).mean(dim=0)
    variance = mean_square - mean.square()
    expected = (together - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
    torch.testing.assert_close(normal, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variance)


def test_batch_statistics_of_regions_leave_padding_slots_out():
    torch.manual_seed(1)
    crops = torch.randn(4, 3, 2, 2)  # two images, two slots each; the last slot is padding
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0]).view(4, 1, 1, 1)
    norm = BatchNorm(3, learns_statistics=True)
    norm(crops, Area(mask=None, weight=weight, num_images=2, learning=True))
    first, second = crops[:2].mean(dim=(0, 2, 3)), crops[2].mean(dim=(1, 2))
    torch.testing.assert_close(norm.running_mean, 0.1 * (first + second) / 2)


def test_stored_statistics_fold_into_the_convolution():
    torch.manual_seed(2)
    conv, norm = Conv(3, 5, 3), BatchNorm(5, learns_statistics=False)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        torch.nn.init.normal_(tensor)
    norm.running_var.uniform_(0.5, 2)
    features = torch.randn(2, 3, 6, 6)
    expected = torch.nn.functional.batch_norm(
        conv(features), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5
    )
    area = Area(mask=None, weight=None, num_images=2, learning=True)
    ours = ConvNorm(conv, norm)(features, area)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.square().sum(), [norm.weight, norm.bias, conv.weight])
    for gradient, other in zip(
        torch.autograd.grad(ours.square().sum(), [norm.weight, norm.bias, conv.weight]), wanted, strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def test_only_unfrozen_stages_learn_statistics_and_only_while_training():
    model = small_model("sync", backbone={"freeze_at": 2})
    batch = small_batch([(64, 96)])
    before = {name: buffer.clone() for name, buffer in model.state_dict().items() if "running" in name}
    model.eval().losses(batch)
    model.train().detect(batch.images)
    assert all(torch.equal(model.state_dict()[name], buffer) for name, buffer in before.items())
    model.losses(batch)
    for name, buffer in before.items():
        changed = not torch.equal(model.state_dict()[name], buffer)
        assert changed == (not name.startswith(("backbone.stem", "backbone.group0"))), name


def test_frozen_statistics_never_change():
    model = small_model("fpn").train()
    before = {name: buffer.clone() for name, buffer in model.state_dict().items() if "running" in name}
    model.losses(small_batch([(64, 96)]))
    assert before
    assert all(torch.equal(model.state_dict()[name], buffer) for name, buffer in before.items())


def rank_step(rank: int, folder: str) -> None:
    """One rank's half of a batch: statistics and gradients to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    _, together, area = padded_maps(3)
    norm = BatchNorm(3, learns_statistics=True)
    share_statistics(norm, over_ranks=True)
    half = Area(mask=None, weight=area.weight[rank : rank + 1], num_images=1, learning=True)
    features = together[rank : rank + 1].clone().requires_grad_()
    weigh = torch.arange(together[0].numel()).view_as(together[:1]).cos() * (rank + 1)
    (norm(features, half) * weigh).sum().backward()
    torch.save({"mean": norm.running_mean, "var": norm.running_var, "grad": features.grad}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_ranks_share_statistics_and_gradients_as_one_batch_does(tmp_path: Path):
    mp.start_processes(rank_step, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    _, together, area = padded_maps(3)
    norm = BatchNorm(3, learns_statistics=True)
    features = together.clone().requires_grad_()
    weigh = torch.arange(together[0].numel()).view_as(together[:1]).cos()
    (norm(features, area) * torch.cat([weigh, weigh * 2])).sum().backward()
    for rank, saved in enumerate(ranks):
        torch.testing.assert_close(saved["mean"], norm.running_mean)
        torch.testing.assert_close(saved["var"], norm.running_var)
        torch.testing.assert_close(saved["grad"][0], features.grad[rank], rtol=1e-4, atol=1e-5)
