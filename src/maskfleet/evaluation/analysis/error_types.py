"""Why detections are wrong, and what each kind of error costs: TIDE's breakdown (Bolya et al., 2020), by hotcoco."""

from __future__ import annotations

from dataclasses import dataclass

import hotcoco

from maskfleet.evaluation.coco_eval import CocoPair, Kind

RIGHT_IOU, BACKGROUND_IOU = 0.5, 0.1
TYPES = {
    "Cls": ("class", "on an object, but of another class"),
    "Loc": ("location", "right class, but IoU 0.1 to 0.5"),
    "Both": ("class and location", "another class, and IoU 0.1 to 0.5"),
    "Dupe": ("duplicate", "on an object that a better detection found"),
    "Bkg": ("background", "on no object: IoU under 0.1"),
    "Miss": ("missed", "objects that no detection found, not even with another class or location"),
}


@dataclass(frozen=True, slots=True)
class ErrorType:
    """One kind of error: how often it happens, and how much AP50 rises if every such error is corrected."""

    name: str
    meaning: str
    count: int
    ap50_cost: float  # 0..1


def error_types(pair: CocoPair, kind: Kind) -> tuple[ErrorType, ...]:
    """TIDE's six kinds of errors at IoU 0.5; each cost is measured with the other errors left as they are.

    `pair` has no crowds.
    """
    evaluation = hotcoco.COCOeval(pair.truth, pair.results, kind)
    evaluation.evaluate()
    told = evaluation.tide_errors(pos_thr=RIGHT_IOU, bg_thr=BACKGROUND_IOU)
    return tuple(
        ErrorType(name, meaning, int(told["counts"][key]), float(told["delta_ap"][key]))
        for key, (name, meaning) in TYPES.items()
    )
