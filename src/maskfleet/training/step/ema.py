"""A moving average of the weights, which often scores a little better than the weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ema:
    """Averages of a model's trainable parameters and statistics."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.averages = {name: tensor.detach().clone() for name, tensor in _moving(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the model's present weights into the averages."""
        present = _moving(model)
        torch._foreach_lerp_(list(self.averages.values()), [present[name] for name in self.averages], 1 - self.decay)

    @contextlib.contextmanager
    def used_by(self, model: nn.Module) -> Iterator[None]:
        """Inside the block `model` computes with the averages."""
        present = _moving(model)
        kept = {name: present[name].detach().clone() for name in self.averages}
        self._copy(self.averages, present)
        try:
            yield
        finally:
            self._copy(kept, present)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)


def _moving(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point state that training may change, by name."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in frozen and tensor.is_floating_point()}
