"""The rows of the table of old names."""

from __future__ import annotations

from dataclasses import dataclass

from maskfleet.config.legacy.values import Kind


@dataclass(frozen=True, slots=True)
class Mapped:
    """An old name for one of our fields, or for several that all get its value."""

    name: str
    path: str | tuple[str, ...]
    kind: Kind
    note: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Our fields, always as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, slots=True)
class Alias:
    """An old name that is an alias of another old one."""

    name: str
    of: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """An old name without a meaning here: why, and what to do. Its old default is accepted without effect.

    A name that ends in * covers all names with that prefix.
    """

    name: str
    why: str
    remedy: str = "remove it"
    accepts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nested:
    """An old name whose value was itself OLD_NAME=VALUE."""

    name: str
    note: str


Row = Mapped | Alias | Removed | Nested
