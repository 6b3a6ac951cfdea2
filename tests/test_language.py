"""Plain English: words that readers stumbled over stay out of code, tests and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "docs", "deploy", "scripts", "benchmarks", "notebooks", ".ci", ".github")
SUFFIXES = {
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".tpl",
    ".txt",
    ".tf",
    ".hcl",
    ".sh",
    ".ipynb",
    ".jinja",
    ".j2",
    ".toml",
    ".cff",
}
# The word, and what to write instead.
AVOID = {
    r"rooms?": "package, module, space",
    r"seeds": "TensorPack, AWS Samples; `seed` for random numbers",
    r"mend(?:s|ed|ing)?": "fix",
    r"wish(?:es|ed)?": "request",
    r"(?:go|goes|going|went|gone) on": "resume, continue",
    r"(?:is|are|was|were) waited for": "wait for",
    r"by heart": "overfit",
    r"how-?manieth": "index, generation number",
    r"anew": "again",
    r"naming_the_dead": "reporting_lost_ranks",
}
PATTERN = re.compile(r"(?<![A-Za-z])(?:" + "|".join(AVOID) + r")(?![A-Za-z])", re.IGNORECASE)


def pages() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    return sorted(path for path in found if path.is_file() and path != Path(__file__))


def words_to_avoid(text: str) -> list[str]:
    """Each place in `text` with a word to avoid; `_` counts as a space, so that identifiers are read too."""
    readable = text.replace("_", " ")
    return [f"{readable.count(chr(10), 0, match.start()) + 1}: {match.group()}" for match in PATTERN.finditer(readable)]


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_words_to_avoid_are_gone(folder: str) -> None:
    inside = [
        path for path in pages() if path.relative_to(ROOT).parts[0] == folder or (folder == "." and path.parent == ROOT)
    ]
    found = {str(path.relative_to(ROOT)): words_to_avoid(path.read_text(encoding="utf-8")) for path in inside}
    assert {name: words for name, words in found.items() if words} == {}


def test_the_rule_reads_prose_and_identifiers() -> None:
    assert words_to_avoid("the run goes\non") == []
    assert words_to_avoid("x = 1\nstop_wish = mended  # it goes on") == ["2: wish", "2: mended", "2: goes on"]
    assert words_to_avoid("recommend, amended, roommate, seed=3, groomed") == []
