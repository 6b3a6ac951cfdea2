"""Run as a script by every rank: fetch the weights of a run, and print the file or the error that this rank got.

Arguments: the run directory, the address of the model zoo, the name of the weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from maskfleet.config.base import replaced
from maskfleet.config.run import RunConfig
from maskfleet.errors import WeightsError
from maskfleet.model.weights.zoo import cache, catalogue
from maskfleet.training import preflight
from maskfleet.training.distributed import joined, worker_from_env


def main(run_dir: Path, address: str, name: str) -> None:
    catalogue.ADDRESSES = (address,)
    fetches = []

    def counted(file: catalogue.ZooFile) -> Path:
        fetches.append(file.name)
        return cache.fetch(file)

    preflight.fetch = counted
    config = replaced(RunConfig(), {"train.weights": name})
    with joined(worker_from_env(os.environ), torch.device("cpu"), os.environ, run_dir) as ranks:
        try:
            preflight.fetch_weights(config, ranks)
            print(f"RESULT {len(fetches)} {preflight.found_weights(name, config)}")
        except WeightsError as error:
            print(f"RESULT {len(fetches)} {error.what}")
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
