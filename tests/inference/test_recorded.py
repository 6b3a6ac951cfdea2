"""Recorded detection finds what eager detection finds."""

from __future__ import annotations

import pytest
import small
import torch

from maskfleet.inference.recorded import RecordedDetector


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.11 imports it while compiling
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["fpn", "c4"])
def test_recorded_detections_are_those_of_the_eager_model_batch_after_batch(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = small.small_model(variant).cuda().eval()
    detector = RecordedDetector(model, dtype=None)
    sizes = [(96, 128), (80, 100)]
    for numbers in ([0, 1], [2, 3]):
        images = small.small_batch(sizes, canvas=(96, 128), numbers=numbers).images.to("cuda")
        expected = model.detect(images)
        found = detector(images)
        assert expected.valid.any()
        torch.testing.assert_close(found.valid, expected.valid)
        torch.testing.assert_close(found.labels, expected.labels)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.boxes, expected.boxes, rtol=1e-4, atol=1e-2)
