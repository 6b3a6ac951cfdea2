"""The path of the data is one: what the docs stage below import_path is where a launch looks for it on FSx."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from maskfleet.config.launch import EksLaunch
from maskfleet.system.deploy_files import deploy_path

DOCS = Path(__file__).parents[2] / "docs"


def found(pattern: str) -> dict[str, set[str]]:
    """What `pattern` matches in each page that has it."""
    pages = {page.relative_to(DOCS).as_posix(): re.findall(pattern, page.read_text()) for page in DOCS.rglob("*.md")}
    return {page: set(matches) for page, matches in pages.items() if matches}


def test_every_page_stages_the_data_below_the_import_path_of_every_page() -> None:
    linked = found(r"import_path=s3://[\w-]+/([\w/-]+)")
    # Not that of an EC2 cluster, whose Lustre shows the prefix of its stack, and not shards, which are read from S3.
    staged = found(r"data stage coco2017 s3://[\w-]+/(?!PREFIX)([\w/-]++)(?! --shards)")
    assert "run-anywhere/infra.md" in linked
    assert {"run-anywhere/eks/index.md", "data/staging.md"} <= set(staged)
    [prefix] = {one for paths in linked.values() for one in paths}
    # FSx shows the prefix as its root.
    assert {one for paths in staged.values() for one in paths} == {f"{prefix}/{EksLaunch().data_dir}"}


def test_the_stage_data_chart_reads_from_the_same_prefix() -> None:
    values = yaml.safe_load(deploy_path("helm", "stage-data", "values.yaml").read_text(encoding="utf-8"))
    [prefix] = {one for paths in found(r"import_path=s3://[\w-]+/([\w/-]+)").values() for one in paths}
    assert values["s3_prefix"] == f"{prefix}/{values['stage_dir']}"
    assert values["stage_dir"] == EksLaunch().data_dir
