"""The optimizers: SGD with TensorPack's settings, and AdamW; and their state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from maskfleet.config.run import TrainConfig

ADAM_VARIANCE_DECAY = 0.999

# In checkpoints, what an optimizer keeps for a parameter is named PREFIX/PARAMETER.
_PREFIXES = {"momentum_buffer": "momentum", "exp_avg": "adam_mean", "exp_avg_sq": "adam_variance", "step": "adam_step"}


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW; weight decay on kernels only; without the frozen parameters."""
    parameters = trainable(model).values()
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = next(model.parameters()).device.type == "cuda"
    foreach = None if fused else True
    if train.optimizer == "adamw":
        betas = (train.momentum, ADAM_VARIANCE_DECAY)
        return torch.optim.AdamW(groups, lr=train.base_lr, betas=betas, fused=fused or None, foreach=foreach)
    return torch.optim.SGD(groups, lr=train.base_lr, momentum=train.momentum, fused=fused or None, foreach=foreach)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training updates, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps for each parameter, named as in checkpoints; empty before the first step."""
    return {
        f"{_PREFIXES[kind]}/{name}": value
        for name, parameter in trainable(model).items()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def state_shapes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors of the names and shapes that `optimizer_state` will have after the first step, scalars left out."""
    kinds = ("exp_avg", "exp_avg_sq") if isinstance(optimizer, torch.optim.AdamW) else ("momentum_buffer",)
    return {f"{_PREFIXES[kind]}/{name}": p for name, p in trainable(model).items() for kind in kinds}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned, in the memory layout of the parameters."""
    for name, parameter in trainable(model).items():
        for kind, prefix in _PREFIXES.items():
            tensor = saved.get(f"{prefix}/{name}")
            if tensor is not None:
                like = tensor.to(parameter.device) if tensor.ndim == 0 else parameter
                optimizer.state[parameter][kind] = torch.empty_like(like, requires_grad=False).copy_(tensor)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of all gradients together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, foreach=True)
