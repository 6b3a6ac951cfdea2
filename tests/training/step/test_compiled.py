"""The parts of the recorded step that a CPU can run; and, on a GPU, the whole of it against the eager one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import golden
import pytest
import small
import torch
from torch import Tensor, nn

from maskfleet.batch import Batch, Images, Outlines, Targets
from maskfleet.config.model import ModelConfig
from maskfleet.config.run import TrainConfig
from maskfleet.data.store.largest import GroundTruthSize
from maskfleet.errors import DataError
from maskfleet.inference.device import keep_compiled_code
from maskfleet.model import metrics
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training.optim import build_optimizer
from maskfleet.training.step.buffers import BatchShapes, Capacity, copy_into, static_batch
from maskfleet.training.step.compiled import CompiledStepRunner, Toolchain, make_step_runner
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.exchange import gradient_buckets
from maskfleet.training.step.finite import FiniteCheck
from maskfleet.training.step.precision import precision_for
from maskfleet.training.step.update import Update

CPU = torch.device("cpu")


def some_batch(num_objects: int, num_edges: int, *, start: int = 1) -> Batch:
    """Two images whose every number is different."""
    numbers = iter(range(start, 100_000))

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([next(numbers) for _ in range(torch.Size(shape).numel())], dtype=dtype).reshape(shape)

    return Batch(
        Images(filled(2, 3, 4, 6), filled(2, 2, dtype=torch.int64)),
        Targets(
            boxes=filled(2, num_objects, 4),
            labels=filled(2, num_objects, dtype=torch.int64),
            valid=torch.ones(2, num_objects, dtype=torch.bool),
            crowd_boxes=torch.zeros(2, 0, 4),
            crowd_valid=torch.zeros(2, 0, dtype=torch.bool),
            outlines=Outlines(
                edges=filled(2, num_edges, 4),
                part=filled(2, num_edges, dtype=torch.int32),
                start=filled(2, num_objects, dtype=torch.int32),
                count=filled(2, num_objects, dtype=torch.int32),
                max_count=num_edges,
                max_parts=2,
            ),
        ),
        seed=filled(2, dtype=torch.int64),
        image_ids=filled(2, dtype=torch.int64),
    )


def test_static_buffers_hold_the_last_batch_and_padding_behind_it() -> None:
    static = static_batch(some_batch(5, 7), Capacity(objects=8, edges=16))
    copy_into(static, some_batch(5, 7))
    smaller = some_batch(3, 4, start=5000)
    copy_into(static, smaller)
    assert torch.equal(static.images.pixels, smaller.images.pixels)
    assert torch.equal(static.seed, smaller.seed)
    assert torch.equal(static.targets.boxes[:, :3], smaller.targets.boxes)
    assert not static.targets.boxes[:, 3:].any()
    assert static.targets.valid.tolist() == [[True] * 3 + [False] * 5] * 2
    assert static.targets.outlines is not None
    assert smaller.targets.outlines is not None
    assert torch.equal(static.targets.outlines.edges[:, :4], smaller.targets.outlines.edges)
    assert torch.equal(static.targets.outlines.count[:, :3], smaller.targets.outlines.count)
    assert not static.targets.outlines.count[:, 3:].any()


def test_capacity_grows_for_the_data_to_what_batches_are_padded_to() -> None:
    capacity = Capacity()
    small_data = GroundTruthSize(objects=93, crowds=1, edges=9000, parts=20)
    assert capacity.grown_for(small_data, crowds=False) == capacity
    assert capacity.grown_for(small_data, crowds=True) == Capacity(crowds=4)
    large_data = GroundTruthSize(objects=129, crowds=5, edges=20_000, parts=33)
    grown = capacity.grown_for(large_data, crowds=True)
    assert grown == Capacity(objects=256, crowds=8, edges=32768, parts=64)


def test_a_batch_beyond_the_capacity_is_an_error_that_names_its_images() -> None:
    capacity = Capacity(objects=4, edges=64)
    capacity.check(some_batch(4, 64))
    batch = some_batch(5, 65)
    with pytest.raises(DataError, match="5 objects instead of 4, 65 edges instead of 64") as caught:
        capacity.check(batch)
    assert all(str(image) in caught.value.what for image in batch.image_ids.tolist())


def test_blank_batches_have_the_layout_of_the_loaders() -> None:
    shapes = BatchShapes(3, ((64, 96), (96, 64)), Capacity(), masks=True)
    landscape, portrait = shapes.examples(CPU)
    assert landscape.images.pixels.shape == (3, 3, 64, 96)
    assert portrait.images.pixels.shape == (3, 3, 96, 64)
    assert landscape.images.pixels.is_contiguous(memory_format=torch.channels_last)
    assert landscape.images.sizes.tolist() == [[64, 96]] * 3
    static = static_batch(landscape, Capacity())
    assert static.targets.boxes.shape == (3, 128, 4)
    assert static.targets.outlines is not None
    assert static.targets.outlines.edges.shape == (3, 16384, 4)


class Line(nn.Module):
    """Weights of two shapes, whose gradients we set by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3))


def two_lines(clip: float, kind: str = "sgd") -> tuple[Line, torch.optim.Optimizer, Line, Update, FiniteCheck]:
    plain, ours, check = Line(), Line(), FiniteCheck(CPU)
    train = TrainConfig(optimizer=kind, weight_decay=0.05)
    optimizer = build_optimizer(plain, train)
    return plain, optimizer, ours, Update(build_optimizer(ours, train), check, gradient_clip=clip), check


@pytest.mark.parametrize("clip", [0.0, 1.5])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_update_moves_weights_as_the_optimizer_does(clip: float, kind: str) -> None:
    plain, optimizer, ours, update, check = two_lines(clip, kind)
    for step in range(4):
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)) * (step + 1)
            ours.get_parameter(name).grad = parameter.grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()
        update.lr.fill_(0.1 / (step + 1))
        check.record({"loss": torch.tensor(1.0)}, torch.tensor([7]))
        update.apply()
    torch.testing.assert_close(ours.kernel, plain.kernel)
    torch.testing.assert_close(ours.bias, plain.bias)
    assert not check.is_blocked()


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_after_a_number_that_is_not_finite_no_weight_moves_and_its_images_are_held(where: str, kind: str) -> None:
    _, _, ours, update, check = two_lines(0.0, kind)
    before = ours.kernel.detach().clone()
    update.lr.fill_(0.1)
    for step in range(3):
        bad = step == 0
        ours.kernel.grad = torch.full((3, 4), torch.inf if bad and where == "gradient" else 1.0)
        ours.bias.grad = torch.ones(3)
        loss = torch.tensor(torch.nan if bad and where == "loss" else 1.0)
        check.record({"a": torch.tensor(1.0), "b": loss}, torch.tensor([step, step + 10]))
        update.apply()
    assert torch.equal(ours.kernel, before)
    assert update.optimizer.state[ours.kernel].get("step", 0) == 0
    assert check.is_blocked()
    error = check.error(world_size=1)
    what = "the loss is not a finite number (b = nan)" if where == "loss" else "the gradient is not a finite number"
    assert error.what == f"{what} on images 0, 10; the weights are unchanged"


def test_gradients_add_up_in_one_piece_in_the_layout_of_their_weights() -> None:
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    [bucket] = gradient_buckets([list(conv.parameters())])
    bucket.attach()
    for _ in range(2):
        (conv.weight.sum() * 2 + (conv.bias * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert bucket.buffer[:54].tolist() == [4.0] * 54
    assert bucket.buffer[64:67].tolist() == [2.0, 4.0, 6.0]
    assert bucket.buffer.count_nonzero() == 57


def test_rehearsal_moves_nothing() -> None:
    _, _, ours, update, check = two_lines(0.0)
    before = ours.kernel.detach().clone()
    ours.kernel.grad, ours.bias.grad = torch.ones(3, 4), torch.ones(3)
    update.lr.fill_(0.1)
    update.dry_run()
    assert torch.equal(ours.kernel, before)
    assert not check.is_blocked()


def test_momentum_is_converted_to_the_memory_layout_of_its_weights() -> None:
    conv = nn.Conv2d(2, 3, 3)
    optimizer = build_optimizer(conv, TrainConfig())
    old = torch.arange(54.0).reshape(3, 2, 3, 3)
    optimizer.state[conv.weight]["momentum_buffer"] = old.clone()
    conv.to(memory_format=torch.channels_last)
    buffer = Update(optimizer, FiniteCheck(CPU), gradient_clip=0.0)._state(conv.weight, "momentum_buffer")
    assert buffer.stride() == conv.weight.stride()
    assert torch.equal(buffer, old)


def test_without_a_gpu_the_eager_step_is_used_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = golden_model()
    runner = make_step_runner(
        model,
        build_optimizer(model, TrainConfig()),
        StepSettings(precision_for("fp32", CPU)),
        compile=True,
    )
    assert isinstance(runner, StepRunner)
    assert "needs a GPU" in caplog.text


def test_compiled_code_is_kept_in_the_users_cache_unless_told_otherwise() -> None:
    env = {"XDG_CACHE_HOME": "/somewhere"}
    keep_compiled_code(env)
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/maskfleet/compiled"
    keep_compiled_code(env | {"TORCHINDUCTOR_CACHE_DIR": "/else"})
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/maskfleet/compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.11 imports it while compiling
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_the_split_step_compiles_and_moves_the_weights_as_the_eager_one() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        weights = []
        compiler = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
        for toolchain in (None, Toolchain(compiler, RerunRecorder())):
            model = small.small_model("fpn").train().to(memory_format=torch.channels_last)
            optimizer = build_optimizer(model, TrainConfig())
            settings = StepSettings(precision_for("fp32", CPU), gradient_clip=5.0, split=True)
            shapes = BatchShapes(2, ((64, 96),), Capacity(objects=16, edges=64, parts=2), masks=True)
            runner = make_step_runner(
                model, optimizer, settings, compile=toolchain is not None, shapes=shapes, toolchain=toolchain
            )
            assert isinstance(runner, StepRunner if toolchain is None else CompiledStepRunner)
            for step in range(2):
                batch = small.small_batch([(64, 96)] * 2, numbers=[2 * step, 2 * step + 1])
                images = dataclasses.replace(batch.images, pixels=batch.images.pixels.to(torch.uint8))
                runner.step(dataclasses.replace(batch, images=images), lr=1e-3, update=True, with_metrics=True)
            weights.append(model.state_dict())
    finally:
        torch.distributed.destroy_process_group()
    eager, compiled = weights
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_metrics_are_no_part_of_what_is_compiled_and_only_logged_steps_compute_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_calls: list[list[str]] = []
    names = ["rpn_metrics", "proposal_metrics", "box_head_metrics", "mask_head_metrics"]
    called: list[str] = []
    for name in names:
        original = getattr(metrics, name)
        monkeypatch.setattr(metrics, name, lambda *a, n=name, f=original, **k: (called.append(n), f(*a, **k))[1])

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*inputs: Any) -> Any:
            called.clear()
            outputs = function(*inputs)
            compiled_calls.append(list(called))
            return outputs

        return compiled

    model = small.small_model("fpn").train()
    settings = StepSettings(precision_for("fp32", CPU))
    runner = CompiledStepRunner(
        model, build_optimizer(model, TrainConfig()), settings, toolchain=Toolchain(compiler, RerunRecorder())
    )
    expected = small.small_model("fpn").train().losses_and_metrics(small.small_batch([(64, 96)] * 2))[1]
    found = []
    for with_metrics in (False, True):
        _, values = runner.step(small.small_batch([(64, 96)] * 2), lr=0.0, update=True, with_metrics=with_metrics)
        found.append(values)
        assert bool(called) == with_metrics
    assert compiled_calls
    assert not any(compiled_calls)
    assert found[0] == {}
    assert found[1].keys() == expected.keys()
    assert all(torch.allclose(found[1][name], value, atol=1e-4) for name, value in expected.items())


def golden_model() -> MaskRCNN:
    # No random choice is left: every anchor and each of the 200 proposals is sampled. (With 2,048 samples Triton 3.6
    # cannot compile a kernel that Inductor fuses from the sort of the regions and their metrics.)
    rpn = {"samples_per_image": 65536}
    rpn |= {f"train_per_level_{when}_nms": 200 for when in ("pre", "post")} | {"train_per_image": 200}
    config = {"num_categories": 80, "rpn": rpn, "box_head": {"samples_per_image": 512}}
    return golden.golden_model(ModelConfig.model_validate(config))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.11 imports it while compiling
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_compiled_losses_on_the_goldens_input_are_those_of_fp32_eager(
    precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = golden_model().to("cpu").train()
    batch = golden.golden_batch(golden.golden("train_fpn_mask_A"))
    expected = {name: value.item() for name, value in model.losses(batch).items()}
    device = torch.device("cuda")
    model.to(device)
    runner = CompiledStepRunner(
        model,
        build_optimizer(model, TrainConfig()),
        StepSettings(precision_for(precision, device)),
    )
    losses, _ = runner.step(batch.to(device), lr=0.0, update=True, with_metrics=True)
    assert runner.is_compiled
    differences = {name: abs(losses[name].item() / value - 1) for name, value in expected.items()}
    print(precision, differences)
    assert max(differences.values()) < tolerance, differences


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.11 imports it while compiling
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("steps_per_update", [1, 2])
def test_recorded_steps_move_the_weights_as_eager_ones_do(
    steps_per_update: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    shapes = [(96, 128), (128, 96)]
    weights = []
    for make in (StepRunner, CompiledStepRunner):
        model = small.small_model("fpn").to(device).train()
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        runner = make(
            model,
            build_optimizer(model, TrainConfig()),
            StepSettings(precision_for("fp32", device), gradient_clip=5.0, steps_per_update=steps_per_update),
        )
        for step in range(4):
            batch = small.small_batch([shapes[step // 2]] * 2, numbers=[2 * step, 2 * step + 1]).to(device)
            runner.step(batch, lr=1e-3, update=(step + 1) % steps_per_update == 0, with_metrics=step == 3)
        weights.append({name: (value - start[name]).norm() for name, value in model.named_parameters()})
    assert isinstance(runner, CompiledStepRunner)
    assert runner.is_compiled
    eager, recorded = weights
    assert sum(move > 0 for move in eager.values()) > 20
    for name, move in eager.items():
        torch.testing.assert_close(recorded[name], move, rtol=1e-2, atol=1e-7, msg=name)
