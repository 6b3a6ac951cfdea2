"""What can go wrong with infrastructure that a user can mend."""

from __future__ import annotations

from maskfleet.errors import MaskfleetError


class InfraError(MaskfleetError):
    """Infrastructure cannot be planned, made, read or removed."""


def interrupted(what: str, *, remedy: str) -> InfraError:
    """The error that ends a command which the user stopped; its exit code is the one of Ctrl-C."""
    error = InfraError(what, remedy=remedy)
    error.exit_code = 130
    return error
