"""Images per second that one core prepares, compared with a plain PIL and pycocotools loader, and memory over time.

    python benchmarks/loader.py [--images 200] [--out benchmarks/results/loader.json]

Both read the same generated set of COCO's image size, in turns, in one process and one thread; CPU time is measured, so
that other jobs on the machine have little influence. The peer does what torchvision's reference does before the
model: PIL decode, `annToMask` for each object, PIL resize to a short side of 800, flip, float tensor; the resize of
its bitmaps, which torchvision does inside the model, is not counted. Ours gives the padded batch the model takes.
`peer_uint8` leaves out the peer's conversion to float. Memory is that of two workers after each of three epochs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from pycocotools.coco import COCO

from machine import machine_facts
from maskfleet.config.run import RunConfig
from maskfleet.data.pipeline.build import build_train_loader
from maskfleet.data.pipeline.loader import TrainLoader
from maskfleet.data.store.dataset import open_stores
from maskfleet.data.synthetic.dataset import make_shapes

HEIGHT, WIDTH, SHORT_EDGE_PX, MAX_PX = 480, 640, 800, 1344
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "loader.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "shapes"
        make_shapes(root, num_train=options.images, num_val=1, height=HEIGHT, width=WIDTH, max_objects=15, workers=2)
        record = machine_facts() | {"set": described(root)}
        record["cpu_ms_per_image"] = speeds = measured_speeds(root)
        record["images_per_cpu_s"] = {name: round(1000 / ms, 1) for name, ms in speeds.items()}
        record["ratio"] = {
            f"{ours} / {peer}": round(speeds[peer] / speeds[ours], 2)
            for ours in ("maskfleet", "maskfleet_resize_on_device")
            for peer in ("peer", "peer_uint8")
        }
        record["worker_memory_mib"] = measured_memory(root)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def measured_speeds(root: Path) -> dict[str, float]:
    """CPU milliseconds per image: the median of ROUNDS turns each."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(root / "annotations" / "instances_train.json"))
    image_ids = sorted(coco.imgs)
    ours = loader_of(root, num_workers=0)
    decoding = loader_of(root, num_workers=0, resize_on="device")
    steps = ours.steps_per_pass
    turns: dict[str, Callable[[int], None]] = {
        "maskfleet": lambda turn: drain(ours, turn * steps, steps),
        "maskfleet_resize_on_device": lambda turn: drain_undelivered(decoding, turn * steps, steps),
        "peer": lambda turn: peer_epoch(coco, root / "train", image_ids, turn, as_float=True),
        "peer_uint8": lambda turn: peer_epoch(coco, root / "train", image_ids, turn, as_float=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(ROUNDS + 1):
        for name, run in turns.items():
            before = time.process_time()
            run(turn)
            if turn:  # the first warms the page cache
                seconds[name].append(time.process_time() - before)
    return {name: round(float(np.median(values)) * 1000 / len(image_ids), 3) for name, values in seconds.items()}


def loader_of(root: Path, **options: Any) -> TrainLoader:
    data = {"root": str(root), "train": ["train"], "num_workers": options.pop("num_workers")}
    config = RunConfig.model_validate({"data": data, "train": {"images_per_gpu": 2}})
    return build_train_loader(config, open_stores(config.data, config.data.train), **options)


def drain(loader: TrainLoader, start: int, steps: int) -> None:
    for _ in loader.batches(start, start + steps):
        pass


def drain_undelivered(loader: TrainLoader, start: int, steps: int) -> None:
    """The work of the workers alone, without the resize, which the GPU does."""
    for step in range(start, start + steps):
        assert loader.pool.dataset[loader.stream.planned(step)].moves is not None


def peer_epoch(coco: COCO, folder: Path, image_ids: list[int], turn: int, *, as_float: bool) -> None:
    rng = np.random.default_rng(turn)
    for image_id in rng.permutation(image_ids).tolist():
        peer_sample(coco, folder, image_id, flip=bool(rng.random() < 0.5), as_float=as_float)


def peer_sample(coco: COCO, folder: Path, image_id: int, *, flip: bool, as_float: bool) -> tuple[torch.Tensor, ...]:
    """Image [3, h, w], boxes [N, 4], labels [N], masks [N, h0, w0] as the usual training script makes them."""
    image = Image.open(folder / coco.imgs[image_id]["file_name"]).convert("RGB")
    annotations = [found for found in coco.imgToAnns[image_id] if not found["iscrowd"]]
    boxes = torch.tensor([found["bbox"] for found in annotations], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    labels = torch.tensor([found["category_id"] for found in annotations])
    bitmaps = [torch.as_tensor(coco.annToMask(found)) for found in annotations]
    masks = torch.stack(bitmaps) if bitmaps else torch.zeros(0, image.height, image.width, dtype=torch.uint8)
    scale = min(SHORT_EDGE_PX / min(image.size), MAX_PX / max(image.size))
    width, height = image.width, image.height
    image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    boxes *= scale
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        masks = masks.flip(-1)
        boxes[:, [0, 2]] = image.width - boxes[:, [2, 0]]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return (pixels.float() / 255 if as_float else pixels), boxes, labels, masks


def measured_memory(root: Path) -> list[dict[str, float]]:
    """Private and resident MiB of the larger of two workers after each of three epochs."""
    loader = loader_of(root, num_workers=2)
    readings = []
    for epoch in range(3):
        drain(loader, epoch * loader.steps_per_pass, loader.steps_per_pass)
        workers = loader.pool._pool._iterator._workers  # type: ignore[union-attr]
        found = [memory_of(worker.pid) for worker in workers]
        readings.append({name: max(memory[name] for memory in found) for name in found[0]})
    loader.close()
    return readings


def memory_of(pid: int) -> dict[str, float]:
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        kib[name.rstrip(":")] = int(value)
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"private": round(private / 1024, 1), "resident": round(kib["Rss"] / 1024, 1)}


def described(root: Path) -> dict[str, Any]:
    tree = json.loads((root / "annotations" / "instances_train.json").read_text())
    files = list((root / "train").iterdir())
    return {
        "images": len(tree["images"]),
        "height": HEIGHT,
        "width": WIDTH,
        "objects_per_image": round(len(tree["annotations"]) / len(tree["images"]), 2),
        "kib_per_file": round(sum(file.stat().st_size for file in files) / len(files) / 1024, 1),
    }


if __name__ == "__main__":
    main()
