"""Predicted efficiency of one instance type per family, and the checks of the scaling model.

    python benchmarks/scaling.py [--seed 0] [--out benchmarks/results/scaling.json]

The same seed gives the same file. `benchmarks/scaling_run.py` measures the run of the last check.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from machine import machine_facts
from maskfleet.bench.scaling.checks import check_mlperf, check_p3dn, check_rounds
from maskfleet.bench.scaling.parameters import BYTES_PER_GRADIENT
from maskfleet.bench.scaling.predict import GPU_COUNTS, Setting, measured_jitter, predictions, step_plan
from maskfleet.bench.scaling.simulate import Jitter, StepPlan, simulate_steps
from maskfleet.bench.scaling.table import USUAL_INSTANCES, as_record
from maskfleet.bench.scaling.topology import NODES

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    options = parser.parse_args()
    records = {}
    for dtype in BYTES_PER_GRADIENT:
        setting = Setting(exchange_dtype=dtype, seed=options.seed)
        found = [one for name in USUAL_INSTANCES for one in predictions(NODES[name], GPU_COUNTS, setting)]
        records[dtype] = as_record(found, setting)
    parts = json.loads((RESULTS / "scaling_run.json").read_text())
    run = check_rounds(parts["rounds"], seed=options.seed)
    record = {
        "commit": machine_facts(())["commit"],
        "checks": {
            "mlperf": dataclasses.asdict(check_mlperf(seed=options.seed)),
            "p3dn": [dataclasses.asdict(one) for one in check_p3dn(seed=options.seed)],
            "run": dataclasses.asdict(run),
        },
        "sensitivity": sensitivity(options.seed),
        **{key: value for key, value in records["fp32"].items() if key not in ("setting", "predictions")},
        "predictions": {dtype: one["predictions"] for dtype, one in records.items()},
    }
    options.out.write_text(compact(record) + "\n")
    print(json.dumps(record["checks"], indent=1))


def sensitivity(seed: int) -> dict[str, float]:
    """Efficiency of 32 GPUs of p5en with 16 images each, if one assumption is wrong."""
    node = NODES["p5en.48xlarge"]
    slow = dataclasses.replace(
        node, network=dataclasses.replace(node.network, bytes_per_s=node.network.bytes_per_s / 2)
    )
    usual = measured_jitter()
    wide = dataclasses.replace(usual, ratios=tuple(1 + 2 * (ratio - 1) for ratio in usual.ratios))
    often = dataclasses.replace(usual, hiccup_chance=10 * usual.hiccup_chance)
    plan = step_plan(node, 32, 16)
    cases = {
        "as assumed": (plan, usual),
        "half the bandwidth between nodes": (step_plan(slow, 32, 16), usual),
        "no overlap of exchange and backward": (dataclasses.replace(plan, overlapped=False), usual),
        "step times vary twice as much": (plan, wide),
        "hiccups ten times as often": (plan, often),
    }
    alone = step_plan(node, 1, 16)
    return {
        name: round(_step_s(alone, jitter, 1, seed) / _step_s(one, jitter, 32, seed), 4)
        for name, (one, jitter) in cases.items()
    }


def _step_s(plan: StepPlan, jitter: Jitter, gpus: int, seed: int) -> float:
    return simulate_steps(plan, jitter, ranks=gpus, steps=400, seed=seed).total_s


def compact(value: object, depth: int = 0) -> str:
    """JSON with one line per prediction and parameter."""
    if isinstance(value, dict) and depth < 2:
        items = [f"{json.dumps(key)}: {compact(one, depth + 1)}" for key, one in value.items()]
        brackets = "{}"
    elif isinstance(value, list):
        items, brackets = [json.dumps(one) for one in value], "[]"
    else:
        return json.dumps(value)
    indent = "\n" + " " * depth
    return f"{brackets[0]}{indent} " + f",{indent} ".join(items) + f"{indent}{brackets[1]}"


if __name__ == "__main__":
    main()
