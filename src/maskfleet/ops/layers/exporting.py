"""Whether operators are being written into a program that must run without maskfleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Not torch.compiler.is_exporting(): Dynamo of torch 2.11 takes it for true in every compiled function.
_exporting = False


def is_exporting() -> bool:
    """Whether only torch's own operators may be used."""
    return _exporting


@contextmanager
def exporting() -> Iterator[None]:
    """Inside the block, functions of `maskfleet.ops` use torch's own operators alone."""
    global _exporting
    before, _exporting = _exporting, True
    try:
        yield
    finally:
        _exporting = before
