"""Detection in one image that is already in memory."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from maskfleet.batch import Images
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.geometry import resized_sizes
from maskfleet.inference.predict import image_results
from maskfleet.model.mask_rcnn import MaskRCNN


def detect_in(
    model: MaskRCNN,
    picture: NDArray[np.uint8],
    run: RunConfig,
    device: torch.device,
    *,
    image_id: int,
    categories: tuple[tuple[int, str], ...] = (),
) -> list[dict[str, Any]]:
    """COCO results of `picture` [h, w, 3] BGR, by falling score; categories count from 1 if they have no ids."""
    original = (picture.shape[0], picture.shape[1])
    data, model_config = run.data, run.model
    height, width = resized_sizes(*original, short_edge_px=data.test_short_edge_px, max_px=model_config.canvas_max_px)[
        0
    ].tolist()
    size = (height, width)
    resized = cv2.resize(picture, (width, height), interpolation=cv2.INTER_LINEAR)
    pixels = torch.from_numpy(resized).permute(2, 0, 1)[None]
    found = model.detect(Images(pixels.to(device), torch.tensor([size], device=device))).to("cpu")
    assert run.model.num_categories is not None
    return image_results(
        found,
        0,
        image_id=image_id,
        resized_hw=size,
        original_hw=original,
        category_ids=[identity for identity, _ in categories] or list(range(1, run.model.num_categories + 1)),
        accurate_paste=run.eval.accurate_paste,
    )
