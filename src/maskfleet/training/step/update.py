"""The update of the weights as a GPU does it by itself: no number is read back, and none is baked in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Update:
    """Fused SGD whose learning rate, and whose permission to move anything, lie on the device.

    Once a loss or a gradient is not finite, no weight moves any more until the host asks `is_stuck` and stops the run.
    """

    def __init__(self, optimizer: torch.optim.SGD, *, gradient_clip: float) -> None:
        self.optimizer = optimizer
        self.gradient_clip = gradient_clip
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self.lr = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)  # the loss, the last one that was allowed to move weights
        self.image_ids: Tensor | None = None  # [B] of that loss's batch
        self._stuck = torch.zeros(1, device=device)  # 1.0 or 0.0, as the fused kernel wants it
        self._sum: Tensor | None = None  # all gradients in one piece, where they are added up or exchanged

    def watch(self, total: Tensor, image_ids: Tensor) -> None:
        """Note the loss of a batch, unless an earlier one is being held for the host to see."""
        if self.image_ids is None or self.image_ids.shape != image_ids.shape:
            self.image_ids = torch.zeros_like(image_ids)
        free = self._stuck[0] == 0
        self.total.copy_(torch.where(free, total, self.total))
        self.image_ids.copy_(torch.where(free, image_ids, self.image_ids))
        self._stuck.copy_(torch.where(torch.isfinite(self.total), self._stuck, 1.0))

    def apply(self) -> None:
        """Move the weights by their gradients."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self._stuck.copy_(torch.where(torch.isfinite(norm), self._stuck, 1.0))
        self._move(norm, self._stuck)

    def rehearse(self) -> None:
        """Do all that `apply` does but move nothing, so that every kernel is loaded before a recording."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self._move(norm, torch.ones_like(self._stuck))

    def is_stuck(self) -> bool:
        """Whether a loss or gradient was not finite; waits for the device."""
        return bool(self._stuck.item() != 0)

    def noted(self) -> tuple[Tensor, Tensor]:
        """What `watch` and `apply` have noted: the loss and whether weights may not move."""
        return self.total.clone(), self._stuck.clone()

    def note(self, noted: tuple[Tensor, Tensor]) -> None:
        """Go back to what was `noted` before a rehearsal."""
        self.total.copy_(noted[0])
        self._stuck.copy_(noted[1])

    def drop_gradients(self) -> None:
        """Have the next backward pass make new gradients instead of adding to the old ones."""
        for parameter in self.parameters:
            parameter.grad = None

    def add_up_gradients(self) -> None:
        """Have backward passes add to zeros that lie in one piece of memory, which `gradient_sum` is."""
        if self._sum is None:
            count = sum(parameter.numel() for parameter in self.parameters)
            self._sum = torch.zeros(count, device=self.parameters[0].device)
        start = 0
        for parameter in self.parameters:
            parameter.grad = self._sum.as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()

    @property
    def gradient_sum(self) -> Tensor:
        """All gradients [their number], as `add_up_gradients` laid them out."""
        assert self._sum is not None
        return self._sum

    def _move(self, norm: Tensor, forbidden: Tensor) -> None:
        # The fused kernel divides gradients by this, as if it were a loss scale.
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
                    is_first_step=False,  # momentum of zero makes the first step like all others
                    grad_scale=scale,
                    found_inf=forbidden,
                )

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """The parameter's momentum, zero at first, in its own memory layout, as the fused kernel needs it."""
        buffer: Tensor | None = self.optimizer.state[parameter].get("momentum_buffer")
        if buffer is None or buffer.stride() != parameter.stride():
            placed = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            if buffer is not None:
                placed.copy_(buffer)
            self.optimizer.state[parameter]["momentum_buffer"] = buffer = placed
        return buffer


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a trainable parameter had no part in the loss"
    return parameter.grad
