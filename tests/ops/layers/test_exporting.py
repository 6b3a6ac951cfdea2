"""A compiled function keeps maskfleet's operators; only a program that is exported has torch's own alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfleet.ops.layers.exporting import exporting, is_exporting
from maskfleet.ops.nms import nms_keep
from maskfleet.ops.roi_align import multilevel_roi_align

BOXES = torch.tensor([[[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0]]])


def operators(work: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the operators in the graph that torch.compile makes of `work`, where torch says that it exports."""
    names: set[str] = set()

    def listing(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        names.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    compiled = torch.compile(work, fullgraph=True, backend=listing)
    # Dynamo of torch 2.11 replaces torch.compiler.is_exporting() by True; later ones read the flag.
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    compiled()
    return names


class Work(torch.nn.Module):
    def forward(self) -> tuple[Tensor, Tensor]:
        kept = nms_keep(BOXES, torch.ones(1, 2, dtype=torch.bool), threshold=0.5)
        maps, extents = [torch.ones(1, 4, 16, 16)], [torch.full((1, 2), 16)]
        levels = torch.zeros(1, 2, dtype=torch.int64)
        return kept, multilevel_roi_align(maps, BOXES, extents, strides=[4], levels=levels, resolution=2)


def test_a_compiled_function_keeps_our_operators_even_where_dynamo_thinks_that_it_exports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = operators(Work(), monkeypatch)
    assert "maskfleet.nms_keep.default" in found
    assert "maskfleet.weighted_rows.default" in found
    assert not any("while_loop" in name for name in found)


def fail_inside() -> None:
    with exporting():
        assert is_exporting()
        raise KeyError


def test_the_flag_is_set_inside_the_block_and_restored_after_an_error() -> None:
    assert not is_exporting()
    with pytest.raises(KeyError):
        fail_inside()
    assert not is_exporting()
