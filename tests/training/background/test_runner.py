"""A run that starts eagerly and switches to compiled steps, with stand-ins for compiler, children and clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from processes import LONG_S

from maskfleet.batch import Batch
from maskfleet.config.base import replaced
from maskfleet.config.recipes import recipe
from maskfleet.config.run import TrainConfig
from maskfleet.errors import TrainingError
from maskfleet.model.build import build_mask_rcnn
from maskfleet.model.mask_rcnn import MaskRCNN
from maskfleet.ops.recorder import RerunRecorder
from maskfleet.training.background import runner as background
from maskfleet.training.background.child import CompileJob
from maskfleet.training.background.runner import Runner, SwitchingRunner, Tools, make_switching_runner
from maskfleet.training.distributed import Ranks, Worker
from maskfleet.training.optim import build_optimizer
from maskfleet.training.ranks import watchdog
from maskfleet.training.ranks.watchdog import Watchdog
from maskfleet.training.step.buffers import BatchShapes, Capacity
from maskfleet.training.step.compiled import Toolchain
from maskfleet.training.step.eager import StepRunner, StepSettings
from maskfleet.training.step.precision import precision_for
from micro_run import MICRO

CPU = torch.device("cpu")
SHAPES = BatchShapes(2, ((64, 64),), Capacity(objects=16, edges=64, parts=2), masks=True)
ALONE = Ranks(Worker(), None)
LONG = 100_000  # steps left
STEP_S = 1.0


class Clock:
    """Every reading is one second after the last."""

    now = 0.0

    def __call__(self) -> float:
        self.now += STEP_S
        return self.now


@dataclass
class Compiling:
    """Children that are done when they were looked after `polls` times."""

    polls: int = 1
    failure: str = ""
    jobs: list[CompileJob] = field(default_factory=list)
    stopped: int = 0

    def start(self, jobs: Sequence[CompileJob]) -> Compiling:
        self.jobs.extend(jobs)
        return self

    def poll(self) -> tuple[bool, str]:
        self.polls -= 1
        return self.polls <= 0, self.failure if self.polls <= 0 else ""

    def stop(self) -> None:
        self.stopped += 1


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def failing(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*inputs: Any) -> Any:
        raise RuntimeError("the compiler crashed")

    return compiled


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MEASURED_UPDATES", 1)
    monkeypatch.setattr(background, "CHECK_EVERY_UPDATES", 1)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    """With pixels of the type that the loader gives."""
    made = [small.small_batch([(64, 64)] * 2, numbers=[2 * step, 2 * step + 1]) for step in range(4)]
    return [replace(batch, images=replace(batch.images, pixels=batch.images.pixels.to(torch.uint8))) for batch in made]


def micro_model() -> MaskRCNN:
    torch.manual_seed(0)
    changes = {name: value for name, value in MICRO.items() if name.startswith("model.")}
    config = replaced(recipe("demo"), {**changes, "model.num_categories": 5}).model
    return build_mask_rcnn(config).train().to(memory_format=torch.channels_last)


def made(
    children: Compiling,
    *,
    compiler: Any = unchanged,
    steps_per_update: int = 1,
    compiled_before: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[MaskRCNN, Runner]:
    model = micro_model()
    settings = StepSettings(precision_for("fp32", CPU), gradient_clip=5.0, steps_per_update=steps_per_update)
    tools = Tools(Toolchain(compiler, RerunRecorder()), children.start, Clock(), lambda jobs: compiled_before)
    runner = make_switching_runner(model, build_optimizer(model, TrainConfig()), settings, SHAPES, ranks, tools)
    return model, runner


def trained(
    model: MaskRCNN, runner: Runner, batches: Sequence[Batch], *, steps_left: int = LONG, steps_per_update: int = 1
) -> list[tuple[float, bool]]:
    """The loss of every step, and whether it was compiled."""
    seen = []
    for number, batch in enumerate(batches):
        update = (number + 1) % steps_per_update == 0
        compiled = runner.is_compiled
        losses, _ = runner.step(batch, lr=0.01, update=update, with_metrics=True)
        seen.append((sum(loss.item() for loss in losses.values()), compiled))
        if update and isinstance(runner, SwitchingRunner):
            runner.after_update(steps_left - number)
    return seen


@pytest.mark.parametrize("steps_left", [LONG, 10])
def test_what_was_compiled_before_needs_no_children(batches: list[Batch], steps_left: int) -> None:
    children = Compiling()
    model, runner = made(children, compiled_before=True)
    seen = trained(model, runner, batches[:2], steps_left=steps_left)
    assert not children.jobs
    assert [compiled for _, compiled in seen] == [False, steps_left == LONG]  # 10 steps of 1 s end before the switch


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_update", [1, 2])
def test_the_run_switches_between_two_updates_and_its_losses_continue(
    batches: list[Batch], steps_per_update: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    eager_model = micro_model()
    settings = StepSettings(precision_for("fp32", CPU), gradient_clip=5.0, steps_per_update=steps_per_update)
    eager = StepRunner(eager_model, build_optimizer(eager_model, TrainConfig()), settings)
    many = [*batches, *batches][: 3 * steps_per_update]
    expected = trained(eager_model, eager, many, steps_per_update=steps_per_update)
    children = Compiling()
    model, runner = made(children, steps_per_update=steps_per_update)
    seen = trained(model, runner, many, steps_per_update=steps_per_update)
    assert [compiled for _, compiled in seen] == [False] * 2 * steps_per_update + [True] * steps_per_update
    eager_steps = 2 * steps_per_update
    assert [loss for loss, _ in seen[:eager_steps]] == [loss for loss, _ in expected[:eager_steps]]
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    for name, value in eager_model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert [job.canvas for job in children.jobs] == [(64, 64)]
    assert children.stopped == 1
    assert "compiling the step in the background" in caplog.text
    assert "the steps are compiled from now on" in caplog.text


def test_a_short_run_starts_no_child_and_says_why(batches: list[Batch], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    children = Compiling()
    seen = trained(*made(children), batches[:3], steps_left=20)
    assert not children.jobs
    assert not any(compiled for _, compiled in seen)
    assert caplog.text.count("would not pay") == 1


def test_a_run_that_is_nearly_over_when_the_children_are_done_stays_eager(
    batches: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    children = Compiling()
    _, runner = made(children)
    assert isinstance(runner, SwitchingRunner)
    for steps_left in (LONG, 30):
        runner.step(batches[0], lr=0.01, update=True, with_metrics=False)
        runner.after_update(steps_left)
    assert not runner.is_compiled
    assert "switching would not pay" in caplog.text


@pytest.mark.parametrize("what", ["child", "start", "settings", pytest.param("compiler", marks=pytest.mark.slow)])
def test_whatever_fails_the_run_stays_eager_with_one_warning(
    what: str, batches: list[Batch], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Compiling(failure="for images of 64 x 64: no space left" if what == "child" else "")
    model, runner = made(children, compiler=failing if what == "compiler" else unchanged)
    assert isinstance(runner, SwitchingRunner)
    if what == "settings":
        monkeypatch.setattr("maskfleet.training.step.compiled.configure_compiler", failing(unchanged))
    if what == "start":
        runner._tools = Tools(runner._tools.toolchain, lambda jobs: 1 // 0, Clock())  # type: ignore[arg-type, return-value]
    seen = trained(model, runner, batches)
    assert not any(compiled for _, compiled in seen)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    reason = {
        "child": "no space left",
        "start": "ZeroDivisionError",
    }.get(what, "the compiler crashed")
    assert reason in warnings[0]
    assert "stays eager" in warnings[0]


def test_a_switch_that_hangs_is_ended_by_the_watchdog(batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.3)
    monkeypatch.setattr(watchdog, "STORE_S", LONG_S)
    monkeypatch.setattr(watchdog, "EXIT_S", LONG_S)
    aborted = threading.Event()
    dog = Watchdog(dist.HashStore(), 0, ["oak", "elm"], timeout_s=0.1, abort=aborted.set)

    def hanging(function: Callable[..., Any]) -> Callable[..., Any]:
        assert aborted.wait(LONG_S)
        return function

    model, runner = made(Compiling(), compiler=hanging, compiled_before=True, ranks=Ranks(Worker(), None, ["oak"], dog))
    with pytest.raises(TrainingError, match=r"while switching to compiled steps.*no answer from rank 1 on elm"):
        trained(model, runner, batches[:2])
    dog.stop()


def test_closing_the_runner_ends_the_children(batches: list[Batch]) -> None:
    children = Compiling(polls=100)
    model, runner = made(children)
    trained(model, runner, batches[:2])
    assert isinstance(runner, SwitchingRunner)
    runner.close()
    runner.close()
    assert children.stopped == 1
