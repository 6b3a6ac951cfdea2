"""What infrastructure costs by the hour, from a dated table of prices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from maskfleet.errors import ConfigError

HOURS_PER_MONTH = 730
# Sections of the table, and the hours that their prices are for.
_SECTIONS = {"instance_hour": 1, "hour": 1, "gib_month": HOURS_PER_MONTH, "month": HOURS_PER_MONTH}


@dataclass(frozen=True, slots=True)
class Billed:
    """Something that AWS bills by the time it exists: `count` times `quantity` of the price named `price`."""

    text: str
    price: str  # section and name in the price table, such as instance_hour/g5.xlarge
    count: int = 1
    quantity: float = 1.0  # GiB of a disk or a file system


@dataclass(frozen=True, slots=True)
class Prices:
    """A table of prices: of which date and region, and US dollars by section and name."""

    date: str
    region: str
    sources: tuple[str, ...]
    table: Mapping[str, Mapping[str, float]]

    def per_hour(self, price: str) -> float | None:
        """US dollars per hour for one unit of `price`, such as gib_month/efs_standard; None if it is not listed."""
        section, _, name = price.partition("/")
        found = self.table.get(section, {}).get(name)
        return None if found is None else found / _SECTIONS[section]


def read_prices(file: Path | None = None) -> Prices:
    """The prices in `file`, or those that come with maskfleet."""
    remedy = "write it like src/maskfleet/infra/prices.toml: date, region, and sections of prices"
    where: Any = file or resources.files("maskfleet.infra") / "prices.toml"
    try:
        data = tomllib.loads(where.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the prices in {where}: {words}", remedy=remedy) from error
    unknown = data.keys() - {"date", "region", "sources", *_SECTIONS}
    if unknown or "date" not in data or "region" not in data:
        what = f"has an unknown part {sorted(unknown)[0]!r}" if unknown else "does not say its date and region"
        raise ConfigError(f"{where} {what}", remedy=remedy)
    sources = data.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(one, str) for one in sources):
        raise ConfigError(f"{where}: sources is not a list of texts", remedy=remedy)
    for section in data.keys() & _SECTIONS.keys():
        if not isinstance(data[section], dict):
            raise ConfigError(f"{where}: {section} is not a table of prices", remedy=remedy)
        for name, value in data[section].items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"{where}: {section}: {name} = {value!r} is not a price", remedy=remedy)
    table = {section: data.get(section, {}) for section in _SECTIONS}
    return Prices(str(data["date"]), str(data["region"]), tuple(sources), table)


def estimate(billed: Sequence[Billed], prices: Prices, *, region: str) -> list[str]:
    """The cost by the hour, item by item with the sum, and what is not known."""
    lines, total, unknown = [], 0.0, []
    for one in billed:
        each = prices.per_hour(one.price)
        if each is None:
            unknown.append(one.text)
            continue
        cost = one.count * one.quantity * each
        total += cost
        lines.append(f"  {cost:10.4f}  {one.text}")
    lines.append(f"  {total:10.4f}  USD per hour, {total * 24:.2f} per day")
    head = f"costs while it exists, by prices of {prices.region} of {prices.date}:"
    notes = [f"  {prices.region}, not {region}: prices there differ"] if region != prices.region else []
    notes += [f"  no price is known for {text}" for text in unknown]
    notes.append(
        "  data transfer, S3 and what grows with use (EFS, NAT traffic) come on top; --prices reads other prices"
    )
    return [head, *lines, *notes]


def monthly(price: str, gib: float, prices: Prices) -> str:
    """Such as `about 12.30 USD per month`."""
    each = prices.per_hour(price)
    if each is None:
        return "at a price that is not listed"
    return f"about {each * HOURS_PER_MONTH * gib:.2f} USD per month by prices of {prices.region} of {prices.date}"
