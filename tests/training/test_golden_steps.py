"""Ten steps from the goldens' weights against TensorPack's update rule, written out in double precision."""

from __future__ import annotations

import copy

import golden
import pytest
import torch

from maskfleet.config.model import ModelConfig
from maskfleet.config.run import TrainConfig
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.model.rpn import Proposals, RpnOutputs
from maskfleet.training.optim import build_optimizer
from maskfleet.training.schedule import schedule_for
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for

# As the goldens were recorded: everything is sampled, so that no random choice is left.
CONFIG = ModelConfig.model_validate(
    {
        "num_categories": 80,
        "rpn": {
            "samples_per_image": 65536,
            "train_per_level_pre_nms": 200,
            "train_per_level_post_nms": 200,
            "train_per_image": 200,
        },
        "box_head": {"samples_per_image": 2048},
    }
)


@pytest.mark.slow
def test_ten_steps_from_the_goldens_weights_follow_tensorpacks_update_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainConfig(accumulate_to_images=1)
    schedule = schedule_for(train, world_size=8, steps_per_pass=1000)
    batch = golden.golden_batch(golden.golden("train_fpn_mask_A"))
    ours = copy.deepcopy(golden.golden_model(CONFIG)).train()
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        fixed = ours.proposals(ours.rpn(ours.features(batch.images)), batch.images.sizes, training=True)

    def same_proposals(self: MaskRCNN, outputs: RpnOutputs, sizes: torch.Tensor, *, training: bool) -> Proposals:
        return fixed

    monkeypatch.setattr(MaskRCNN, "proposals", same_proposals)
    runner = StepRunner(
        ours,
        build_optimizer(ours, train),
        StepSettings(precision_for("fp32", torch.device("cpu"))),
    )
    moving = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
    exact = {name: parameter.detach().double() for name, parameter in moving.items()}
    velocity = {name: torch.zeros_like(value) for name, value in exact.items()}
    for step in range(10):
        rate = schedule.lr_at(step)
        assert rate == pytest.approx(1e-5 + step / 1000 * (0.01 - 1e-5))
        twin.load_state_dict(ours.state_dict())  # gradients at the same place: the rule is tested, not chaos
        runner.step(batch, lr=rate, update=True, with_metrics=False)
        twin.zero_grad()
        torch.stack(list(twin.losses(batch).values())).sum().backward()
        for name, parameter in moving.items():
            assert parameter.grad is not None
            decay = 1e-4 * exact[name] if parameter.ndim > 1 else 0.0  # of 1e-4 / 2 * W^2, on kernels alone
            velocity[name] = 0.9 * velocity[name] + parameter.grad.double() + decay
            exact[name] -= rate * velocity[name]
    start = golden.golden_model(CONFIG).state_dict()
    for name, parameter in ours.named_parameters():
        if name in exact:
            error = (parameter.detach().double() - exact[name]).abs().max()
            assert float(error) <= 1e-5 * float(exact[name].abs().max()), name
            assert not torch.equal(parameter, start[name]), name
        else:
            assert torch.equal(parameter, start[name]), name
