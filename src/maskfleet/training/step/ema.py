"""An exponential moving average of the weights, which often scores slightly better than the weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ema:
    """Moving averages of a model's trainable parameters and statistics."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.averages = {name: tensor.detach().clone() for name, tensor in _trained_state(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the averages with the model's current weights."""
        current = _trained_state(model)
        torch._foreach_lerp_(list(self.averages.values()), [current[name] for name in self.averages], 1 - self.decay)

    @contextlib.contextmanager
    def used_by(self, model: nn.Module) -> Iterator[None]:
        """Inside the block `model` has the averages as its weights."""
        current = _trained_state(model)
        saved = {name: current[name].detach().clone() for name in self.averages}
        self._copy(self.averages, current)
        try:
            yield
        finally:
            self._copy(saved, current)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)


def _trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point parameters and buffers that training may change, by name."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in frozen and tensor.is_floating_point()}
