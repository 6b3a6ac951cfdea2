"""One step: TensorPack's update rule, and no step at all on a loss that is no number."""

from __future__ import annotations

import pytest
import torch

from maskfleet.batch import Batch
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.store.dataset import open_stores
from maskfleet.errors import ConfigError, TrainingError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.training.optim import build_optimizer, load_optimizer_state, optimizer_state
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.ema import Ema
from maskfleet.training.step.precision import precision_for


@pytest.fixture
def config(micro: RunConfig) -> RunConfig:
    return replaced(micro, {"model.num_categories": 2, "train.gradient_clip": 0.0, "model.backbone.freeze_at": 1})


@pytest.fixture
def model(config: RunConfig) -> MaskRCNN:
    torch.manual_seed(1)
    return build_mask_rcnn(config.model).train()


@pytest.fixture
def batches(config: RunConfig) -> list[Batch]:
    return list(build_train_loader(config, open_stores(config.data, config.data.train)).batches(0, 10))


def runner(model: MaskRCNN, config: RunConfig, **changes: float) -> StepRunner:
    return StepRunner(
        model,
        build_optimizer(model, config.train),
        StepSettings(
            precision_for("fp32", torch.device("cpu")),
            gradient_clip=changes.get("gradient_clip", 0.0),
            steps_per_update=int(changes.get("steps_per_update", 1)),
        ),
    )


def test_ten_steps_follow_tensorpacks_update_rule(model: MaskRCNN, config: RunConfig, batches: list[Batch]) -> None:
    """w -= lr * v, v = 0.9 v + d(loss + 1e-4 / 2 * sum of squared kernels)/dw, frozen parameters apart."""
    twin = build_mask_rcnn(config.model).train()
    twin.load_state_dict(model.state_dict())
    stepper = runner(model, config)
    velocity = {
        name: torch.zeros_like(p, dtype=torch.float64) for name, p in twin.named_parameters() if p.requires_grad
    }
    exact = {name: p.detach().double() for name, p in twin.named_parameters() if p.requires_grad}
    for number, batch in enumerate(batches):
        lr = 0.001 * (number + 1)
        stepper.step(batch, lr=lr, update=True, with_metrics=False)
        twin.zero_grad()
        kernels = [p for p in twin.parameters() if p.requires_grad and p.ndim > 1]
        decay = 1e-4 * 0.5 * torch.stack([(kernel**2).sum() for kernel in kernels]).sum()
        (torch.stack(list(twin.losses(batch).values())).sum() + decay).backward()
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                velocity[name] = 0.9 * velocity[name] + parameter.grad.double()
                exact[name] -= lr * velocity[name]
                parameter.data.copy_(exact[name])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.double(), exact[name], rtol=1e-5, atol=1e-6), name
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(torch.equal(model.state_dict()[name], twin.state_dict()[name]) for name in frozen)


def test_gradients_of_several_steps_add_up_to_their_mean(
    model: MaskRCNN, config: RunConfig, batches: list[Batch]
) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stepper = runner(model, config, steps_per_update=2)
    stepper.step(batches[0], lr=0.1, update=False, with_metrics=False)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    expected = {}
    twin = build_mask_rcnn(config.model).train()
    twin.load_state_dict(model.state_dict())
    for batch in batches[:2]:
        (torch.stack(list(twin.losses(batch).values())).sum() / 2).backward()
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            decay = 1e-4 * parameter if parameter.ndim > 1 else 0.0
            expected[name] = parameter - 0.1 * (parameter.grad + decay)
    stepper.step(batches[1], lr=0.1, update=True, with_metrics=False)
    for name, value in expected.items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-7), name


def test_clipping_limits_the_norm_of_all_gradients(model: MaskRCNN, config: RunConfig, batches: list[Batch]) -> None:
    free = replaced(config, {"train.weight_decay": 0.0, "train.momentum": 0.0})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    runner(model, free, gradient_clip=0.01).step(batches[0], lr=1.0, update=True, with_metrics=False)
    moved = (
        torch.stack([(p.detach() - before[name]).square().sum() for name, p in model.named_parameters()]).sum().sqrt()
    )
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_is_no_number_stops_before_the_weights_change(
    model: MaskRCNN, config: RunConfig, batches: list[Batch]
) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.rpn.objectness.bias.fill_(float("nan"))
    with pytest.raises(TrainingError) as caught:
        runner(model, config).step(batches[0], lr=0.1, update=True, with_metrics=False)
    for image_id in batches[0].image_ids.tolist():
        assert str(image_id) in caught.value.what
    assert "rpn_losses/label_loss = nan" in caught.value.what
    assert "base_lr" in caught.value.remedy
    unchanged = {name: p for name, p in model.named_parameters() if name != "rpn.objectness.bias"}
    assert all(torch.equal(parameter, before[name]) for name, parameter in unchanged.items())


def test_momentum_is_saved_and_put_back(model: MaskRCNN, config: RunConfig, batches: list[Batch]) -> None:
    stepper = runner(model, config)
    stepper.step(batches[0], lr=0.01, update=True, with_metrics=False)
    saved = {name: buffer.clone() for name, buffer in optimizer_state(model, stepper.optimizer).items()}
    fresh = build_optimizer(model, config.train)
    assert optimizer_state(model, fresh) == {}
    load_optimizer_state(model, fresh, saved)
    assert all(torch.equal(buffer, saved[name]) for name, buffer in optimizer_state(model, fresh).items())
    assert saved.keys() == optimizer_state(model, fresh).keys()


def test_averages_follow_the_weights_and_are_lent_for_evaluation(model: MaskRCNN) -> None:
    ema = Ema(model, decay=0.75)
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.requires_grad)
    start = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(4.0)
    ema.update(model)
    assert torch.allclose(ema.averages[name], start + 1.0)
    with ema.used_by(model):
        assert torch.allclose(parameter, start + 1.0)
    assert torch.allclose(parameter, start + 4.0)


def test_fp16_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        precision_for("fp16", torch.device("cpu"))
    assert precision_for("auto", torch.device("cpu")).name == "fp32"


def test_bf16_losses_are_near_those_of_fp32(model: MaskRCNN, config: RunConfig, batches: list[Batch]) -> None:
    exact = model.losses(batches[0])
    with precision_for("bf16", torch.device("cpu")).autocast():
        rough = model.losses(batches[0])
    for name, value in exact.items():
        assert float(rough[name].detach()) == pytest.approx(float(value.detach()), rel=0.1, abs=0.02), name
