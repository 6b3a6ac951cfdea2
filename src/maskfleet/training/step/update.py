"""The weight update as part of a CUDA graph: all of its inputs are on the GPU, and nothing is read back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskfleet.training.optim import gradient_norm


class Update:
    """Fused SGD with the learning rate and a flag that blocks updates in device memory.

    Once a loss or a gradient is not finite, updates are blocked until the host calls `is_blocked` and stops the run.
    """

    def __init__(self, optimizer: torch.optim.SGD, *, gradient_clip: float) -> None:
        self.optimizer = optimizer
        self.gradient_clip = gradient_clip
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self.lr = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)  # the newest loss, or the one that blocked updates
        self.image_ids: Tensor | None = None  # [B] of that loss's batch
        self._blocked = torch.zeros(1, device=device)  # 1.0 or 0.0, as the fused kernel expects it
        self._sum: Tensor | None = None  # all gradients in one buffer, where they are accumulated or reduced

    def check_loss(self, total: Tensor, image_ids: Tensor) -> None:
        """Record the loss of a batch and block updates if it is not finite; a loss that blocked them stays recorded."""
        if self.image_ids is None or self.image_ids.shape != image_ids.shape:
            self.image_ids = torch.zeros_like(image_ids)
        is_free = self._blocked[0] == 0
        self.total.copy_(torch.where(is_free, total, self.total))
        self.image_ids.copy_(torch.where(is_free, image_ids, self.image_ids))
        self._blocked.copy_(torch.where(torch.isfinite(self.total), self._blocked, 1.0))

    def apply(self) -> None:
        """Update the weights by their gradients."""
        norm = gradient_norm(self.parameters)
        self._blocked.copy_(torch.where(torch.isfinite(norm), self._blocked, 1.0))
        self._sgd(norm, self._blocked)

    def dry_run(self) -> None:
        """Run the kernels of `apply` without changing a weight, so that all are loaded before a graph capture."""
        self._sgd(gradient_norm(self.parameters), torch.ones_like(self._blocked))

    def is_blocked(self) -> bool:
        """Whether a loss or gradient was not finite; waits for the device."""
        return bool(self._blocked.item() != 0)

    def state(self) -> tuple[Tensor, Tensor]:
        """A copy of the recorded loss and of the flag that blocks updates."""
        return self.total.clone(), self._blocked.clone()

    def restore(self, state: tuple[Tensor, Tensor]) -> None:
        """Restore `state`, as it was before warm-up passes."""
        self.total.copy_(state[0])
        self._blocked.copy_(state[1])

    def drop_gradients(self) -> None:
        """Make the next backward pass allocate new gradients instead of adding to the old ones."""
        for parameter in self.parameters:
            parameter.grad = None

    def accumulate_gradients(self) -> None:
        """Make backward passes add to one contiguous buffer, `gradient_sum`, which is zero at first."""
        if self._sum is None:
            count = sum(parameter.numel() for parameter in self.parameters)
            self._sum = torch.zeros(count, device=self.parameters[0].device)
        start = 0
        for parameter in self.parameters:
            parameter.grad = self._sum.as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()

    @property
    def gradient_sum(self) -> Tensor:
        """All gradients in one vector, which `accumulate_gradients` allocated."""
        assert self._sum is not None
        return self._sum

    def _sgd(self, norm: Tensor, blocked: Tensor) -> None:
        # The fused kernel divides gradients by this, like a loss scale.
        scale = (norm / self.gradient_clip).clamp(min=1).reshape(1) if self.gradient_clip > 0 else None
        for group in self.optimizer.param_groups:
            parameters: list[Tensor] = group["params"]
            with torch.no_grad():
                torch._fused_sgd_(
                    parameters,
                    [_gradient(parameter) for parameter in parameters],
                    [self._momentum_of(parameter) for parameter in parameters],
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

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """The parameter's momentum, zero at first, in the parameter's memory layout, as the fused kernel requires."""
        buffer: Tensor | None = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is None or buffer.stride() != parameter.stride():
            same_layout = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            if buffer is not None:
                same_layout.copy_(buffer)
            self.optimizer.state[parameter]["momentum_buffer"] = buffer = same_layout
        return buffer


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a trainable parameter does not contribute to the loss"
    return parameter.grad
