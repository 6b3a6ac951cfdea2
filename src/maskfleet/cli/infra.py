"""`maskfleet infra`: create, show and remove the infrastructure that jobs run on."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.infra_stack import (
    StackOptions,
    down_stack,
    is_stack,
    plan_stack,
    show_outputs,
    show_status,
    up_stack,
)
from maskfleet.cli.options import JsonOption
from maskfleet.errors import ConfigError

if TYPE_CHECKING:
    from maskfleet.infra.terraform.session import Options, Session

app = typer.Typer(help="Create, show and remove the infrastructure that jobs run on.", no_args_is_help=True)

StackArgument = Annotated[
    str, typer.Argument(metavar="STACK", help="What to create: eks, ec2 or sagemaker.", show_default=False)
]
WorkdirOption = Annotated[
    Path | None, typer.Option(help="Work folder. Default: maskfleet-infra/STACK.", show_default=False)
]
VarOption = Annotated[
    list[str] | None,
    typer.Option("--var", metavar="NAME=VALUE", help="Set a Terraform variable; remembered.", show_default=False),
]
VarFileOption = Annotated[
    list[Path] | None,
    typer.Option("--var-file", help="Set variables from a .tfvars or .json file; remembered.", show_default=False),
]
BucketOption = Annotated[
    str | None, typer.Option(help="S3 bucket for the state, locked and encrypted; remembered.", show_default=False)
]
BucketRegionOption = Annotated[
    str | None, typer.Option(help="Region of that bucket. Default: the region of the cluster.", show_default=False)
]
LockTableOption = Annotated[
    str | None, typer.Option(help="DynamoDB table for the lock, for Terraform before 1.10.", show_default=False)
]
CreateBucketOption = Annotated[
    bool,
    typer.Option(
        "--create-state-bucket", help="Create that bucket if it is missing: versioned, encrypted, not public."
    ),
]
TakeOursOption = Annotated[
    bool, typer.Option("--take-ours", help="Replace files edited in the work folder; yours are kept as NAME.yours.")
]
UseClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="An EKS cluster that exists: install only what it lacks, change nothing else; remembered.",
        show_default=False,
    ),
]
ConfigFileOption = Annotated[
    Path | None, typer.Option("--config", help="ec2: YAML file with the settings.", show_default=False)
]
PricesOption = Annotated[
    Path | None, typer.Option(help="ec2: TOML file with prices, instead of ours.", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def plan(
    context: typer.Context,
    stack: StackArgument,
    workdir: WorkdirOption = None,
    var: VarOption = None,
    var_file: VarFileOption = None,
    state_bucket: BucketOption = None,
    state_region: BucketRegionOption = None,
    state_lock_table: LockTableOption = None,
    take_ours: TakeOursOption = False,
    use_cluster: UseClusterOption = None,
    detailed_exitcode: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit with 2 if something would change, with 0 if not.")
    ] = False,
    config: ConfigFileOption = None,
    prices: PricesOption = None,
) -> None:
    """Show what would be created, changed and destroyed, and which of it is billed; change nothing."""
    if is_stack(stack, context):
        plan_stack(StackOptions(stack, config, prices), detailed_exitcode=detailed_exitcode)
        return
    from maskfleet.infra.existing import up as existing
    from maskfleet.infra.terraform import plan as planning
    from maskfleet.infra.terraform.session import only_one

    state = (state_bucket, state_region, state_lock_table)
    options = _options(stack, workdir, var, var_file or (), *state, take_ours, use_cluster=use_cluster)
    with only_one(options):
        session = _session(options, stack, update=True)
        plans = planning.plan(session) if session.existing is None else (existing.plan_existing(session),)
    if detailed_exitcode and any(plan is None or plan.has_changes for plan in plans):
        raise typer.Exit(2)


@app.command()
def up(
    context: typer.Context,
    stack: StackArgument,
    workdir: WorkdirOption = None,
    var: VarOption = None,
    var_file: VarFileOption = None,
    state_bucket: BucketOption = None,
    state_region: BucketRegionOption = None,
    state_lock_table: LockTableOption = None,
    take_ours: TakeOursOption = False,
    create_state_bucket: CreateBucketOption = False,
    use_cluster: UseClusterOption = None,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Accept settings that replace a file system, with all data in it.")
    ] = False,
    yes: YesOption = False,
    config: ConfigFileOption = None,
    prices: PricesOption = None,
    stack_wait: Annotated[
        float | None,
        typer.Option("--wait", min=0, help="ec2, sagemaker: seconds to wait for the stack (7200).", show_default=False),
    ] = None,
) -> None:
    """Create or change everything: plan, ask, apply. Run again after a failure or Ctrl-C, it resumes.

    With --use-cluster: look at a cluster that exists, and install only what it lacks.
    """
    if is_stack(stack, context):
        up_stack(StackOptions(stack, config, prices, yes), delete_data=delete_data, wait_s=stack_wait)
        return
    from maskfleet.infra.existing import up as existing
    from maskfleet.infra.terraform import up as applying
    from maskfleet.infra.terraform.session import only_one

    state = (state_bucket, state_region, state_lock_table)
    options = _options(stack, workdir, var, var_file or (), *state, take_ours, create_state_bucket, use_cluster)
    with only_one(options):
        session = _session(options, stack, update=True, yes=yes)
        if session.existing is None:
            applying.up(session, delete_data=delete_data)
        else:
            existing.up_existing(session)
    err.print(f"maskfleet infra outputs {stack} shows what was created", markup=False)


@app.command()
def status(
    context: typer.Context,
    stack: StackArgument,
    workdir: WorkdirOption = None,
    var: VarOption = None,
    state_bucket: BucketOption = None,
    use_cluster: UseClusterOption = None,
    as_json: JsonOption = False,
    config: ConfigFileOption = None,
) -> None:
    """Show what exists, its last command, whether the cluster answers; exit with 1 unless all is well."""
    if is_stack(stack, context):
        show_status(StackOptions(stack, config), as_json=as_json)
        return
    from maskfleet.infra.terraform import status as report

    found = report.status(_session(_options(stack, workdir, var, (), state_bucket, use_cluster=use_cluster), stack))
    if as_json:
        print_raw(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        out.print(f"{found.cluster}, state in {found.state_in}", markup=False)
        for root in found.roots:
            out.print(f"{root.root}: {root.resources} resources, serial {root.serial}; {root.last}", markup=False)
            for address in root.tainted:
                out.print(f"  creation failed, the next up replaces it: {address}", markup=False)
            if root.settings_changed:
                out.print("  files or settings changed since the last up", markup=False)
        answers = {True: "answers, ", False: "does not answer: ", None: ""}[found.reachable]
        out.print(f"cluster: {answers}{found.detail}", markup=False)
    raise typer.Exit(0 if found.is_well else 1)


@app.command()
def outputs(
    context: typer.Context,
    stack: StackArgument,
    workdir: WorkdirOption = None,
    var: VarOption = None,
    state_bucket: BucketOption = None,
    use_cluster: UseClusterOption = None,
    as_json: JsonOption = False,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="Write a kubeconfig for the cluster to this file; `-` prints the aws command instead."),
    ] = None,
    config: ConfigFileOption = None,
) -> None:
    """Show what was created: ids, endpoints and roles, for charts and for `maskfleet launch`; secrets are masked."""
    if is_stack(stack, context):
        show_outputs(StackOptions(stack, config), as_json=as_json)
        return
    from maskfleet.infra.terraform import status as report

    session = _session(_options(stack, workdir, var, (), state_bucket, use_cluster=use_cluster), stack)
    if kubeconfig is not None:
        _write_kubeconfig(session, report.access(session), kubeconfig)
        return
    found = report.outputs(session)
    if as_json:
        print_raw(json.dumps(found, indent=2))
    else:
        width = max(map(len, found), default=0)
        for name, value in found.items():
            text = value if isinstance(value, str) else json.dumps(value)
            out.print(f"{name:{width}}  {text}".rstrip(), markup=False)


@app.command()
def down(
    context: typer.Context,
    stack: StackArgument,
    workdir: WorkdirOption = None,
    var: VarOption = None,
    state_bucket: BucketOption = None,
    use_cluster: UseClusterOption = None,
    delete_data: Annotated[
        bool,
        typer.Option("--delete-data", help="Also delete file systems and volumes, with all data; buckets are kept."),
    ] = False,
    skip_cluster: Annotated[
        bool, typer.Option("--skip-cluster", help="Do not look into the cluster; for one that is gone.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds to wait; eks: for load balancers and nodes to be deleted (900), else: for the stack (7200).",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    config: ConfigFileOption = None,
    prices: PricesOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="ec2: after a failed deletion, leave behind what cannot be deleted.")
    ] = False,
) -> None:
    """Remove everything but data: jobs, load balancers, nodes, then the cluster. Safe to run again.

    From a cluster that maskfleet did not create, only what it installed there and what nobody uses is removed.
    """
    if is_stack(stack, context):
        of_stack = StackOptions(stack, config, prices, yes)
        down_stack(of_stack, delete_data=delete_data, force=force, wait_s=wait)
        return
    from maskfleet.infra.existing.down import down_existing
    from maskfleet.infra.terraform import down as remove
    from maskfleet.infra.terraform.session import only_one

    options = _options(stack, workdir, var, (), state_bucket, use_cluster=use_cluster)
    session = _session(options, stack, yes=yes)
    with only_one(options):
        wait_s = 900 if wait is None else wait
        chosen = remove.DownOptions(delete_data=delete_data, skip_cluster=skip_cluster, wait_s=wait_s)
        (remove.down if session.existing is None else down_existing)(session, chosen)


def _options(stack: str, workdir: Path | None, var: list[str] | None, *rest: Any, **more: Any) -> Options:
    from maskfleet.infra.terraform.session import Options

    return Options(workdir or Path("maskfleet-infra") / stack, var or (), *rest, **more)


def _session(options: Options, stack: str, *, update: bool = False, yes: bool = False) -> Session:
    """The session of a work folder; `update` copies our new files and the settings of the options into it."""
    from maskfleet.cli.infra_view import TerminalView
    from maskfleet.infra import stacks
    from maskfleet.infra.terraform.session import open_session, read_session

    if stack != "eks":
        raise ConfigError(f"there is no infrastructure {stack!r}", remedy="write eks, ec2 or sagemaker")
    session = open_session if update else read_session
    return session(options, stacks.eks(), TerminalView(yes=yes), os.environ)


def _write_kubeconfig(session: Session, access: dict[str, Any], target: Path) -> None:
    from maskfleet.infra.kubernetes.access import kubeconfig_of, update_command
    from maskfleet.system.files import write_private_json

    if str(target) == "-":
        print_raw(shlex.join(update_command(access, profile=session.profile)))
    elif target.exists():
        raise ConfigError(f"{target} exists", remedy="name a new file; `-` prints the command that adds to one")
    else:
        write_private_json(target, kubeconfig_of(access, profile=session.profile))
        err.print(f"wrote {target}: export KUBECONFIG={shlex.quote(str(target))}", markup=False)
