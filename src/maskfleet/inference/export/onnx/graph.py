"""An ONNX graph that grows node by node, with the few idioms that the detector needs.

Every value is the name of a tensor in the graph. Operators are those of opset 17, which all current runtimes read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor

OPSET = 17
IR_VERSION = 8  # what was current with this opset; older runtimes refuse a newer one
FLOAT, DOUBLE, INT64, UINT8 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.INT64,
    onnx.TensorProto.UINT8,
)
ZERO_INT64 = helper.make_tensor("zero", INT64, [1], [0])

Value = str
Number = float | int


class Graph:
    """Nodes and constants of one graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[Value, onnx.TensorProto] = {}
        self._constants: dict[tuple[Any, ...], Value] = {}

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> Value:
        """The one output of a new node."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: Value, outputs: int, **attributes: Any) -> list[Value]:
        """The outputs of a new node."""
        names = [f"{kind}_{len(self.nodes)}" + (f"_{number}" if number else "") for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attributes))
        return names

    def tensor(self, name: str, values: Tensor) -> Value:
        """Weights on the CPU under a name of their own, as float32; layers that run twice share them."""
        if name not in self.initializers:
            array = np.ascontiguousarray(values.detach().float().numpy())
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def constant(self, values: Sequence[Any] | Number | NDArray[Any], dtype: type[np.generic] = np.int64) -> Value:
        """A small constant; equal ones share a tensor."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self.initializers[name] = numpy_helper.from_array(array, name)
            self._constants[key] = name
        return self._constants[key]

    def real(self, values: Sequence[Any] | Number | NDArray[Any]) -> Value:
        """A float32 constant."""
        return self.constant(values, np.float32)

    def cast(self, value: Value, to: int) -> Value:
        return self.op("Cast", value, to=to)

    def add(self, a: Value, b: Value) -> Value:
        return self.op("Add", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.op("Mul", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.op("Sub", a, b)

    def side(self, value: Value, axis: int) -> Value:
        """The length [1] int64 of `value` along `axis`."""
        return self.op("Shape", value, start=axis, end=axis + 1)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        return self.op("Reshape", value, self.constant(shape))

    def rows(self, table: Value, index: Value, axis: int = 0) -> Value:
        """The rows `index` of `table`."""
        return self.op("Gather", table, index, axis=axis)

    def cut(self, value: Value, start: int, end: int, axis: int = 0) -> Value:
        """`value[start:end]` along `axis`."""
        return self.op("Slice", value, self.constant([start]), self.constant([end]), self.constant([axis]))

    def without_last(self, value: Value) -> Value:
        """`value[:-1]`."""
        return self.cut(value, 0, -1)

    def unsqueeze(self, value: Value, *axes: int) -> Value:
        return self.op("Unsqueeze", value, self.constant(axes))

    def concat(self, values: Sequence[Value], axis: int = 0) -> Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def count_up(self, length: Value) -> Value:
        """0, 1, ... as int64, `length` [1] of them."""
        limit = self.op("Squeeze", length, self.constant([0]))
        return self.op("Range", self.constant(0), limit, self.constant(1))

    def where_true(self, condition: Value) -> Value:
        """The positions [n] where `condition` [N] holds."""
        return self.op("Squeeze", self.op("NonZero", condition), self.constant([0]))

    def best(self, scores: Value, most: int, *, largest: bool = True) -> tuple[Value, Value]:
        """The `most` best of `scores` [N], or all if there are fewer, in order -> scores and positions, each [k].

        Of equal scores the lower position comes first: ONNX says so of TopK.
        """
        count = self.op("Min", self.constant([most]), self.side(scores, 0))
        values, index = self.ops("TopK", scores, count, outputs=2, axis=0, largest=int(largest), sorted=1)
        return values, index
