"""YAML that would take minutes, fill the memory or end in a traceback is refused with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskfleet.config.load import resolve
from maskfleet.config.yaml import MAX_BYTES, parse_value, read_mapping
from maskfleet.errors import ConfigError

LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" if n else "a0: &a0 [1]\n" for n in range(12))
BAD = {
    "brackets": "a: " + "[" * 5000,
    "braces": "{a: " * 5000,
    "dashes": "- " * 5000 + "1",
    "closed brackets": "a: " + "[" * 40 + "]" * 40,
    "300,000 keys": "".join(f"key{n}: {n}\n" for n in range(300_000)),
    "an alias of itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a\n  b: *a\n",
    "a billion values": LAUGHS,
    "a date that is none": "a: 2001-99-99\n",
    "a tag": "a: !!python/object/apply:os.system [ls]\n",
    "an unknown alias": "a: *b\n",
    "NUL": "a: \0\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a long number": f"a: {'9' * 5000}\n",
    "a key that is a list": "? [1, 2]\n: 3\n",
}


@pytest.mark.parametrize("name", list(BAD))
def test_such_a_file_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BAD[name])
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        resolve(file=file)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 2000, "&a [*a]", "2001-99-99", "x" * (MAX_BYTES + 1)])
def test_such_a_value_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set train\.base_lr") as caught:
        parse_value(text, where="--set train.base_lr")
    assert len(caught.value.what) < 400


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 131,072 bytes"):
        read_mapping(Path("/dev/zero"))


def test_anchors_still_work(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  train: &sets [a]\n  val: *sets\n")
    assert resolve(file=file).config.data.val == ("a",)
