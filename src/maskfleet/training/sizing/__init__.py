"""How many images per GPU a run takes if `train.images_per_gpu` is auto."""
