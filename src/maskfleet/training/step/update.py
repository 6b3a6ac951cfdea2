"""The weight update as part of a CUDA graph: all of its inputs are on the GPU, and nothing is read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maskfleet.training.optim import gradient_norm
from maskfleet.training.step.finite import FiniteCheck


class Update:
    """Fused SGD or AdamW with the learning rate and a flag that blocks updates in device memory.

    Once `check` has seen a loss or a gradient that is not finite, updates are blocked until the host reads that and
    stops the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, check: FiniteCheck, *, gradient_clip: float) -> None:
        self.optimizer = optimizer
        self.gradient_clip = gradient_clip
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self.lr = torch.zeros((), device=self.parameters[0].device)
        self._check = check

    def apply(self) -> None:
        """Update the weights by their gradients."""
        norm = gradient_norm(self.parameters)
        self._check.block_unless_finite(norm)
        self._move(norm, self._check.blocked)

    def dry_run(self) -> None:
        """Run the kernels of `apply` without changing a weight, so that all are loaded before a graph capture."""
        self._move(gradient_norm(self.parameters), torch.ones_like(self._check.blocked))

    def drop_gradients(self) -> None:
        """Make the next backward pass allocate new gradients instead of adding to the old ones."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def _move(self, norm: Tensor, blocked: Tensor) -> None:
        # The fused kernels divide gradients by this, like a loss scale.
        scale = (norm / self.gradient_clip).clamp(min=1).reshape(1) if self.gradient_clip > 0 else None
        move = self._adamw if isinstance(self.optimizer, torch.optim.AdamW) else self._sgd
        for group in self.optimizer.param_groups:
            move(group, scale, blocked)

    def _sgd(self, group: dict[str, Any], scale: Tensor | None, blocked: Tensor) -> None:
        parameters: list[Tensor] = group["params"]
        torch._fused_sgd_(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            self._state_of(parameters, "momentum_buffer"),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # with momentum of zero the first step is like all others
            grad_scale=scale,
            found_inf=blocked,
        )

    def _adamw(self, group: dict[str, Any], scale: Tensor | None, blocked: Tensor) -> None:
        parameters: list[Tensor] = group["params"]
        steps = [self._adam_step(parameter) for parameter in parameters]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            self._state_of(parameters, "exp_avg"),
            self._state_of(parameters, "exp_avg_sq"),
            [],
            steps,
            lr=self.lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=blocked,
        )
        torch._foreach_sub_(steps, [blocked.reshape(())] * len(steps))  # a blocked update does not count

    def _adam_step(self, parameter: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        return state["step"]

    def _state_of(self, parameters: list[Tensor], kind: str) -> list[Tensor]:
        """What the optimizer keeps, zero at first, in the layout of the parameters, as the fused kernels require."""
        return [self._state(parameter, kind) for parameter in parameters]

    def _state(self, parameter: Tensor, kind: str) -> Tensor:
        buffer: Tensor | None = self.optimizer.state[parameter].get(kind)
        if buffer is None or buffer.stride() != parameter.stride():
            same_layout = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            if buffer is not None:
                same_layout.copy_(buffer)
            self.optimizer.state[parameter][kind] = buffer = same_layout
        return buffer


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a trainable parameter does not contribute to the loss"
    return parameter.grad
