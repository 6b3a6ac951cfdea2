"""SGD with TensorPack's settings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from maskfleet.config.run import TrainConfig


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.SGD:
    """SGD with momentum; weight decay on kernels only; without the frozen parameters."""
    parameters = trainable(model).values()
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=train.base_lr,
        momentum=train.momentum,
        fused=fused or None,
        foreach=None if fused else True,
    )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training updates, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def momentum_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Momentum buffers by parameter name; empty before the first step."""
    return {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in trainable(model).items()
        if optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
    }


def load_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, buffers: dict[str, Tensor]) -> None:
    """Restore what `momentum_state` returned."""
    for name, parameter in trainable(model).items():
        if name in buffers:
            buffer = torch.empty_like(parameter, memory_format=torch.preserve_format)
            buffer.copy_(buffers[name])
            optimizer.state[parameter]["momentum_buffer"] = buffer


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of all gradients together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, foreach=True)
