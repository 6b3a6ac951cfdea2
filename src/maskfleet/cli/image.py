"""`maskfleet image`: build and push the images that jobs run in, and list those in ECR."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import JsonOption

app = typer.Typer(help="Build and push the images that jobs run in; list those in ECR.", no_args_is_help=True)

ToolOption = Annotated[
    str | None, typer.Option("--with", help="docker, podman or buildah. Default: the first that works.")
]
NotebookOption = Annotated[bool, typer.Option("--notebook", help="Also the notebook image.")]
RegionOption = Annotated[str | None, typer.Option(help="AWS region. Default: AWS_REGION or the AWS configuration.")]


@app.command()
def build(
    cpu: Annotated[bool, typer.Option("--cpu", help="For CPUs only: no CUDA, no EFA, no compiler.")] = False,
    notebook: NotebookOption = False,
    base: Annotated[
        str | None, typer.Option(help="Base image: Debian or Ubuntu. Default: docker.io/library/ubuntu:24.04.")
    ] = None,
    efa: Annotated[bool, typer.Option("--efa/--no-efa", help="Install EFA and aws-ofi-nccl.")] = True,
    efa_installer: Annotated[
        Path | None, typer.Option(help="A copy of aws-efa-installer-VERSION.tar.gz. Default: downloaded.")
    ] = None,
    pip_args: Annotated[
        str | None, typer.Option(help="More arguments for pip in the build, such as another index.")
    ] = None,
    compiled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="File of `maskfleet cache save`, which spares runs the compiler; may be repeated."
        ),
    ] = None,
    tool: ToolOption = None,
) -> None:
    """Build the training image from this version of maskfleet; prints its name."""
    from maskfleet.infra.images.build import BuildOptions
    from maskfleet.infra.images.build import build as build_images
    from maskfleet.infra.images.builder import find_builder
    from maskfleet.launch.wheel import built_wheel

    options = BuildOptions(not cpu, efa, efa_installer, base, pip_args, notebook, _named(compiled or []))
    builder = find_builder(tool, env=os.environ)
    _say(f"building with {builder.name}")
    _, name, content = built_wheel()
    for image in build_images(options, (name, content), builder, env=os.environ, say=_say):
        print_raw(image.name)
    _say("push it with: maskfleet image push")


@app.command()
def push(
    to: Annotated[
        str | None,
        typer.Option(help="Repository: a name in ECR, or a full address. Default: the repository maskfleet."),
    ] = None,
    region: RegionOption = None,
    notebook: NotebookOption = False,
    tag: Annotated[str | None, typer.Option(help="Tag. Default: the version and a hash of the content.")] = None,
    kms_key: Annotated[
        str | None, typer.Option(help="KMS key that encrypts a new repository. Default: AES-256.")
    ] = None,
    tool: ToolOption = None,
) -> None:
    """Push the image that was built last; prints its digest, which `maskfleet launch` takes from now on."""
    from maskfleet.infra.images.builder import find_builder
    from maskfleet.infra.images.push import PushOptions
    from maskfleet.infra.images.push import push as push_images
    from maskfleet.infra.images.record import ImageJournal

    last = ImageJournal(os.environ).built("train")
    builder = find_builder(tool or (last.tool if last else None), env=os.environ)
    options = PushOptions(to, region, tag, kms_key, notebook)
    for image in push_images(options, builder, env=os.environ, say=_say):
        print_raw(image.reference)


@app.command("list")
def list_images(
    repository: Annotated[
        str | None, typer.Argument(help="Repository in ECR: a name or an address. Default: the repository maskfleet.")
    ] = None,
    region: RegionOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the images of a repository in ECR, newest first: tags, digest, date, size."""
    from maskfleet.errors import ConfigError
    from maskfleet.infra.images.ecr import EcrRepository, ecr_address

    address = ecr_address(repository, region)
    if address is None:
        raise ConfigError(f"{repository} is not in Amazon ECR", remedy="use the registry's own tools to list it")
    found = EcrRepository(address)
    images = found.images()
    if as_json:
        print_raw(json.dumps([dataclasses.asdict(image) for image in images or []], indent=2))
        return
    if not images:
        state = "does not exist" if images is None else "is empty"
        _say(f"the repository {found.name} of the AWS account {found.account} in {found.region} {state}")
        return
    width = max(len(_tags(image.tags)) for image in images)
    for image in images:
        size = f"{image.size_bytes / 1e9:.2f} GB"
        out.print(f"{_tags(image.tags):{width}}  {image.digest}  {image.pushed_at}  {size:>9}", markup=False)


def _tags(tags: tuple[str, ...]) -> str:
    return ", ".join(tags) or "(no tag)"


def _say(text: str) -> None:
    err.print(text, markup=False)


def _named(compiled: list[Path]) -> dict[str, Path]:
    """Files of compiled code by the names under which runs find them; without any, torch is not imported."""
    if not compiled:
        return {}
    from maskfleet.training.background.shared import named_for_runs

    return named_for_runs(compiled)
