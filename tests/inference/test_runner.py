"""Recorded, padded and batched detection finds what the eager model finds; a stand-in repeats the work of a graph."""

from __future__ import annotations

import logging
import threading

import pytest
import small
import torch

from maskfleet.batch import Detections, Images
from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import eval_batch_size
from maskfleet.data.pipeline.loader import ExpectedImages
from maskfleet.errors import MaskfleetError
from maskfleet.inference.recorded import Work, detected
from maskfleet.inference.runner import MIN_BATCHES_TO_RECORD, DetectionRunner, detection_dtype
from maskfleet.model.mask_rcnn import MaskRCNN

CPU = torch.device("cpu")
CANVAS = (96, 128)
SIZES = [(96, 128), (80, 100), (96, 120), (90, 128)]


class OverwritingCapture:
    """A stand-in for CUDA graphs: calls the work again and, like a graph, writes to the same tensors each time."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    def __call__(self, work: Work) -> Work:
        self.captured += 1
        static = work()

        def replay() -> Detections:
            self.replays += 1
            found = work()
            for name in ("boxes", "scores", "labels", "valid", "masks"):
                getattr(static, name).copy_(getattr(found, name))
            return static

        return replay


def failing_capture(work: Work) -> Work:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.fixture(scope="module")
def model() -> MaskRCNN:
    return small.small_model("fpn").eval()


def images(count: int, start: int = 0) -> Images:
    numbers = list(range(start, start + count))
    return small.small_batch(SIZES[:count], canvas=CANVAS, numbers=numbers).images


def assert_same(found: Detections, expected: Detections) -> None:
    assert expected.valid.any()
    for name in ("boxes", "scores", "labels", "valid", "masks"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def test_on_the_cpu_detection_is_eager_to_the_last_bit(model: MaskRCNN) -> None:
    runner = DetectionRunner(model, CPU)
    expected = model.detect(images(2))
    found = runner(images(2), expected_images=100_000)
    for name in ("boxes", "scores", "labels", "valid", "masks"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_the_last_batch_is_padded_to_the_recorded_one_and_cut_off(model: MaskRCNN) -> None:
    capture = OverwritingCapture()
    runner = DetectionRunner(model, CPU, capture=capture)
    for batch, left in ((images(3), 40), (images(3, start=3), 37), (images(1, start=6), 1)):
        found = runner(batch, expected_images=left)
        assert len(found.valid) == len(batch.sizes)
        assert_same(found, model.detect(batch))
    assert (capture.captured, capture.replays) == (1, 3)


def test_few_images_are_not_recorded(model: MaskRCNN) -> None:
    capture = OverwritingCapture()
    runner = DetectionRunner(model, CPU, capture=capture)
    assert_same(runner(images(2), expected_images=2), model.detect(images(2)))
    assert capture.captured == 0
    never = DetectionRunner(model, CPU, compile=False, capture=capture)
    never(images(1), expected_images=100_000)
    assert capture.captured == 0


def test_a_shape_that_returns_often_is_recorded_without_being_announced(model: MaskRCNN) -> None:
    capture = OverwritingCapture()
    runner = DetectionRunner(model, CPU, capture=capture)
    for number in range(MIN_BATCHES_TO_RECORD + 1):
        runner(images(1, start=number))
    assert (capture.captured, capture.replays) == (1, 2)


def test_recorded_detection_follows_the_weights(model: MaskRCNN) -> None:
    runner = DetectionRunner(small.small_model("fpn").eval(), CPU, capture=OverwritingCapture())
    before = runner(images(1), expected_images=100).scores.clone()
    with torch.no_grad():
        for parameter in runner.model.box_heads.parameters():
            parameter.mul_(1.5)
    after = runner(images(1), expected_images=99)
    assert not torch.equal(after.scores, before)
    assert_same(after, runner.model.detect(images(1)))


def test_detection_continues_eagerly_if_it_cannot_be_recorded(
    model: MaskRCNN, caplog: pytest.LogCaptureFixture
) -> None:
    runner = DetectionRunner(model, CPU, compile=True, capture=failing_capture)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(runner(images(1), expected_images=100), model.detect(images(1)))
    assert [record.getMessage() for record in caplog.records] == [
        f"detection cannot be {mode} and runs slower: RuntimeError: operation not permitted when stream is capturing"
        for mode in ("compiled", "recorded")
    ]


def test_a_batch_that_needs_too_much_memory_is_split(
    model: MaskRCNN, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, detect, most = model.detect(images(3)), model.detect, 1

    def detect_few(given: Images) -> Detections:
        if len(given.sizes) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return detect(given)

    monkeypatch.setattr(model, "detect", detect_few)
    assert_same(DetectionRunner(model, CPU)(images(3)), expected)
    assert "3 images in one forward pass need too much memory: set eval.images_per_gpu lower" in caplog.messages
    most = 0
    with pytest.raises(MaskfleetError, match="too little memory to detect objects in an image of 96 x 128"):
        DetectionRunner(model, CPU)(images(3))


@pytest.mark.parametrize(
    ("compile", "expected_images", "mode"),
    [
        ("auto", 16, "eager"),
        ("auto", 5_000, "recorded"),
        ("auto", 12 * 5_000, "compiled"),
        (True, 16, "compiled"),
    ],
)
def test_compiling_must_pay(
    model: MaskRCNN, compile: bool, expected_images: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskfleet.inference.runner.TRITON_IS_INSTALLED", True)
    runner = DetectionRunner(model, CPU, compile=compile, capture=OverwritingCapture())
    assert runner.mode(torch.Size([16, 3, 800, 1344]), expected_images) == mode


@pytest.mark.parametrize(
    ("fields", "device", "dtype"),
    [
        ({"train.precision": "bf16"}, "cpu", None),
        ({"eval.precision": "bf16"}, "cpu", torch.bfloat16),
        ({"eval.precision": "fp32"}, "cuda", None),
        ({}, "cuda", torch.bfloat16),
    ],
)
def test_precision_of_detection(
    fields: dict[str, str], device: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert detection_dtype(replaced(RunConfig(), fields), torch.device(device)) == dtype


def test_one_image_at_a_time_on_the_cpu_unless_configured() -> None:
    assert eval_batch_size("auto", CPU) == 1
    assert eval_batch_size(4, CPU) == 4


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["fpn", "c4"])
def test_uncompiled_recordings_detect_as_the_eager_model_does(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = small.small_model(variant).cuda().eval()
    runner = DetectionRunner(model, torch.device("cuda"))
    for start, left in ((0, 40), (2, 38)):
        batch = images(2, start=start).to("cuda")
        assert runner.mode(batch.pixels.shape, left) == "recorded"
        assert_same(runner(batch, expected_images=left), model.detect(batch))
    assert not runner._failed


def test_recordings_made_ahead_serve_the_first_batch(model: MaskRCNN) -> None:
    capture = OverwritingCapture()
    runner = DetectionRunner(model, CPU, capture=capture)
    runner.prepare({CANVAS: ExpectedImages(count=2, batch_size=3)})
    assert capture.captured == 0, "two images are too few"
    for _ in range(2):
        runner.prepare({CANVAS: ExpectedImages(count=40, batch_size=3)})
    assert (capture.captured, capture.replays) == (1, 0)
    for batch, left in ((images(3), 40), (images(1, start=3), 37)):
        given = Images(batch.pixels.to(torch.uint8), batch.sizes)
        assert_same(runner(given, expected_images=left), model.detect(given))
    assert (capture.captured, capture.replays) == (1, 2)


def test_canvases_are_recorded_side_by_side_where_memory_allows(
    model: MaskRCNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=600)

    def capture(work: Work) -> Work:
        both.wait()  # fails if the other canvas is recorded only after this one
        return work

    runner = DetectionRunner(model, CPU, capture=capture)
    monkeypatch.setattr(runner, "_recording_threads", lambda expected: max(1, len(expected)))
    runner.prepare({CANVAS: ExpectedImages(40, 2), (CANVAS[1], CANVAS[0]): ExpectedImages(40, 2)})
    given = Images(images(2).pixels.to(torch.uint8), images(2).sizes)
    assert not runner._failed
    assert_same(runner(given, expected_images=40), model.detect(given))
    assert any(thread.name.startswith("recording") for thread in threading.enumerate()), "plans end with their thread"
    runner.prepare({CANVAS: ExpectedImages(40, 2)})
    assert len(runner._threads) == 1, "it is recorded already"


def test_canvases_are_recorded_one_by_one_without_memory_or_if_compiled(
    model: MaskRCNN, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {torch.Size([16, 3, *CANVAS]): 1000, torch.Size([16, 3, *CANVAS[::-1]]): 100}
    for free_gib, compile, threads in ((139, "auto", 2), (40, "auto", 1), (1, "auto", 1), (139, True, 1)):
        runner = DetectionRunner(model, torch.device("cuda"), compile=compile, capture=OverwritingCapture())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free_gib: (free * 2**30, 143 * 2**30))
        assert runner._recording_threads(expected) == threads
    assert DetectionRunner(model, CPU, capture=OverwritingCapture())._recording_threads(expected) == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_recordings_made_by_two_threads_detect_as_the_eager_model_does(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    cuda = torch.device("cuda")
    model = small.small_model("fpn").to(cuda).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    runner = DetectionRunner(model, cuda, dtype=dtype)
    runner.prepare({CANVAS: ExpectedImages(40, 2), (CANVAS[1], CANVAS[0]): ExpectedImages(40, 2)})
    assert len(runner._threads) == 1, "a small model must fit twice"
    assert not runner._failed
    for start in (0, 2):
        upright = images(2, start=start)
        for turned in (False, True):
            pixels = upright.pixels.transpose(2, 3) if turned else upright.pixels
            sizes = upright.sizes.flip(1) if turned else upright.sizes
            given = Images(pixels.to(torch.uint8), sizes).to(cuda)
            assert_same(runner(given, expected_images=40), detected(model.detect, given, dtype))
    assert len(runner._recorded.shapes) == 2  # type: ignore[union-attr]
