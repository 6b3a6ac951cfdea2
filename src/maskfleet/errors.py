"""Errors that a user can fix.

MaskfleetError            every error meant for people; the command line prints it without a traceback
├── ConfigError           run.yaml, --set, a recipe or a field is wrong
├── DataError             images or annotations are missing, broken or inconsistent
│   └── DataSourceError   where the data are cannot be read or has changed; it is not about one image
├── WeightsError          a weights file cannot be read or does not fit the model
├── TrainingError         a run cannot start, continue or resume
├── LaunchError           a job cannot be sent, found or followed
│   └── ConnectionBrokenError   a connection to a host or pod broke; a new one may work
└── InfraError            infrastructure cannot be planned, created, read or removed
"""


class MaskfleetError(Exception):
    """An error that a user can fix: what happened, and what to do about it."""

    exit_code = 2

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  → {self.remedy}"


class ConfigError(MaskfleetError):
    """The configuration is wrong: an unknown key, a bad value, a contradiction, an unreadable file."""


class DataError(MaskfleetError):
    """Images or annotations are missing, broken or inconsistent."""


class DataSourceError(DataError):
    """The place of the data cannot be read, or has changed: leaving out one image does not help."""


class WeightsError(MaskfleetError):
    """A weights file cannot be read, or does not fit the model."""


class TrainingError(MaskfleetError):
    """A run cannot start, continue or resume."""


class LaunchError(MaskfleetError):
    """A job cannot be sent, found or followed."""


class ConnectionBrokenError(LaunchError):
    """The connection to a host or pod broke; a new one may work."""


class InfraError(MaskfleetError):
    """Infrastructure cannot be planned, created, read or removed."""
