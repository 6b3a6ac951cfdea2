"""`maskfleet launch`: the same run on this machine, on hosts reached by SSH, on SageMaker or on EKS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, print_raw
from maskfleet.cli.options import ConfigOption, DataOption, RecipeOption, SetOption, with_data

if TYPE_CHECKING:
    from maskfleet.config.launch import AnyLaunch
    from maskfleet.launch.backend import Backend
    from maskfleet.launch.job import JobHandle


STACK_HELP = "CloudFormation stack. ssh: its instances are the hosts; sagemaker: its role, network and file systems."


def launch(
    on: Annotated[
        str | None,
        typer.Option("--on", help="local, ssh, sagemaker or eks. Default: the file's launch section, or local."),
    ] = None,
    recipe: RecipeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    data: DataOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the job. Default: derived from the run.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; with ssh, the first N hosts.")] = None,
    instance: Annotated[str | None, typer.Option(help="Instance type, which determines the GPUs per machine.")] = None,
    instances: Annotated[Path | None, typer.Option(help="JSON file with facts about more instance types.")] = None,
    hosts: Annotated[
        str | None, typer.Option(help="ssh: hosts separated by commas, each optionally with =SLOTS.")
    ] = None,
    hosts_file: Annotated[Path | None, typer.Option(help="ssh: file with `host slots=8` lines.")] = None,
    stack: Annotated[str | None, typer.Option(help=STACK_HELP)] = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="ssh, eks: fewest machines with which the run continues.")
    ] = None,
    starter: Annotated[str | None, typer.Option("--with", help="ssh: supervisor or mpirun.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="local: processes to train with; eks: processes per node.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="sagemaker, eks: training image. Default: the newest that was pushed.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="eks: Kubernetes namespace. Default: kubeflow.")] = None,
    context: Annotated[str | None, typer.Option(help="eks: kubectl context. Default: the current one.")] = None,
    max_restarts: Annotated[int | None, typer.Option(min=0, help="Restarts before a run counts as failed.")] = None,
    launch_set: Annotated[
        list[str] | None,
        typer.Option("--launch-set", metavar="FIELD=VALUE", help="Change any other field of the launch section."),
    ] = None,
    accept_new: Annotated[bool, typer.Option("--accept-new", help="ssh: trust hosts whose key is unknown.")] = False,
    persist: Annotated[
        bool, typer.Option("--persist", help="local, ssh: continue by itself after a reboot of the hosts.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print exactly what would be sent; send nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; the run continues.")] = False,
) -> None:
    """Launch a run; prints a handle for status, logs, explain and cancel."""
    from maskfleet.config.load import resolve
    from maskfleet.launch.backend import backend_for
    from maskfleet.launch.instances import INSTANCES, with_overrides

    resolved = resolve(recipe_name=recipe, file=config, sets=with_data(set_, data))
    changes: dict[str, Any] = {
        "instance": instance,
        "hosts": tuple(part.strip() for part in hosts.split(",")) if hosts else None,
        "hosts_file": str(hosts_file) if hosts_file else None,
        "stack": stack,
        "min_nodes": min_nodes,
        "starter": starter,
        "ranks": ranks,
        "image": image,
        "namespace": namespace,
        "context": context,
        "max_restarts": max_restarts,
        "accept_new_host_keys": True if accept_new else None,
        "detach": True if detach else None,
        "persist": True if persist else None,
    }
    target = launch_config(resolved.launch, on, {k: v for k, v in changes.items() if v is not None}, launch_set or [])
    target = with_newest_image(target)
    known = with_overrides(instances) if instances is not None else INSTANCES
    backend = backend_for(target, nodes=nodes, known=known)
    rendered = backend.render(backend.job(resolved.config, name=name))
    if dry_run:
        print_raw(rendered.text())
        return
    handle = backend.submit(rendered)
    print_raw(str(handle))
    if not detach:
        follow(backend, handle)


def launch_config(base: AnyLaunch | None, on: str | None, changes: dict[str, Any], sets: list[str]) -> AnyLaunch:
    """The launch section of the file if it is for the target `on`, changed by the options of the command line."""
    from maskfleet.config.launch import DEFAULT_TARGET, LAUNCH_CLASSES
    from maskfleet.config.yaml import parse_value
    from maskfleet.errors import ConfigError
    from maskfleet.launch.api.jobs import validated_launch

    data: dict[str, Any] = base.model_dump(mode="python") if base is not None and on in (None, base.on) else {}
    data["on"] = on or data.get("on", DEFAULT_TARGET)
    kind = LAUNCH_CLASSES.get(data["on"])
    if kind is not None:
        exclusive = getattr(kind, "exclusive_fields", ())
        if changes.keys() & set(exclusive):
            data = {field: value for field, value in data.items() if field not in exclusive}
        if "detach" not in kind.model_fields:  # a run elsewhere continues without this terminal anyway
            changes.pop("detach", None)
        if "retries" in kind.model_fields and "max_restarts" in changes:
            changes["retries"] = changes.pop("max_restarts")
    data |= changes
    for text in sets:
        field, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--launch-set {text!r} has no value", remedy="write --launch-set FIELD=VALUE")
        data[field.strip()] = parse_value(value, where=f"--launch-set {field}")
    return validated_launch(data)


def with_newest_image(target: AnyLaunch) -> AnyLaunch:
    """`target` with the newest pushed image if its jobs run in one and none is named."""
    from maskfleet.config.base import replaced
    from maskfleet.infra.images.newest import newest_image

    if "image" not in type(target).model_fields or getattr(target, "image", None):
        return target
    found = newest_image(region=getattr(target, "region", None), cpu=getattr(target, "gpus", None) == 0, env=os.environ)
    err.print(f"image {found.reference}, pushed {found.pushed_at}", markup=False)
    return replaced(target, {"image": found.reference})


def follow(backend: Backend, handle: JobHandle) -> None:
    """Print the log until the run ends, and exit as it did; Ctrl-C cancels a local run and leaves others running."""
    from maskfleet.launch.job import JobState

    try:
        for line in backend.logs(handle, follow=True):
            print_raw(line)
    except KeyboardInterrupt:
        if backend.cancels_on_interrupt:
            err.print("stopping; everything is saved first", markup=False)
            backend.cancel(handle)
            raise typer.Exit(130) from None
        err.print(f"the run continues; follow it again with: maskfleet logs -f {handle}", markup=False)
        raise typer.Exit(0) from None
    status = backend.status(handle)
    if status.state is JobState.FAILED:
        err.print(backend.explain(handle), markup=False)
    if status.state is not JobState.DONE:
        raise typer.Exit(status.exit_code or 1)
