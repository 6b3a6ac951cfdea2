"""`maskfleet endpoint`: a trained model on SageMaker that answers requests."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskfleet.cli.console import err, out, print_raw
from maskfleet.cli.options import BestOption, JsonOption, LastOption, StepOption, chosen_checkpoint
from maskfleet.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from maskfleet.launch.sagemaker.endpoint.request import EndpointSpec
    from maskfleet.launch.sagemaker.endpoint.state import EndpointStatus
    from maskfleet.launch.sagemaker.services import Services

app = typer.Typer(help="A trained model on SageMaker that answers requests.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Name of the endpoint.", show_default=False)]
RegionOption = Annotated[
    str | None, typer.Option(help="AWS region. Default: that of the AWS configuration.", show_default=False)
]


@app.command("deploy")
def deploy(
    name: NameArgument,
    source: Annotated[
        str,
        typer.Argument(
            help="Handle of a finished job (sagemaker://REGION/JOB), run directory or weights file.",
            show_default=False,
        ),
    ],
    stack: Annotated[
        str | None, typer.Option(help="Stack of `maskfleet infra up sagemaker`: role, network and bucket.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image in ECR. Default: that of the job, or else the newest that was pushed.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="ARN of the execution role, instead of the stack's.")] = None,
    upload: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix for weights of this machine, instead of the stack's.")
    ] = None,
    instance: Annotated[str, typer.Option(help="Instance type.")] = "ml.g5.xlarge",
    count: Annotated[int, typer.Option(min=1, help="Instances; with --serverless, requests at once.")] = 1,
    best: BestOption = False,
    last: LastOption = False,
    step: StepOption = None,
    score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Lowest score in answers to requests that name none.")
    ] = None,
    is_async: Annotated[
        bool, typer.Option("--async", help="Queue requests in S3: larger images, and answers that take longer.")
    ] = False,
    serverless: Annotated[
        int | None, typer.Option(min=1024, max=6144, help="MiB of memory of a serverless endpoint, on CPUs.")
    ] = None,
    ami: Annotated[
        str | None, typer.Option(help="SageMaker's AMI version. Default: drivers for CUDA 13 on GPU types.")
    ] = None,
    region: RegionOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Update an endpoint of this name if it differs.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the endpoint answers.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests; send nothing.")] = False,
) -> None:
    """Deploy a trained model as the endpoint NAME. Its instances cost money until you delete it."""
    from maskfleet.launch.sagemaker.endpoint.deploy import deploy as send
    from maskfleet.launch.sagemaker.endpoint.deploy import finish
    from maskfleet.launch.sagemaker.endpoint.model import upload as upload_archive
    from maskfleet.launch.sagemaker.endpoint.request import endpoint_requests

    choice = _Choice(source, best=best, last=last, step=step)
    places = _Places(stack, image, role, upload)
    with tempfile.TemporaryDirectory() as folder:
        services = _services(choice, region)
        made = _deployment(services, name, choice, places, instance, serverless, Path(folder))
        spec = dataclasses.replace(
            made.spec,
            count=count,
            environment=tuple(sorted({**dict(made.spec.environment), **_score(score)}.items())),
            async_uri=f"{made.prefix()}/async/{name}" if is_async else None,
            ami=ami or made.spec.ami,
        )
        if dry_run:
            print_raw(json.dumps(endpoint_requests(spec), indent=2))
            return
        if made.archive is not None and upload_archive(services, made.archive, spec.model_uri):
            err.print(f"uploaded the model to {spec.model_uri}", markup=False)
    is_sent = send(services, spec, replace=replace, say=_say)
    if not is_sent:
        err.print(f"endpoint {name} has this model and these settings already", markup=False)
    if wait:
        finish(services, spec, _say)
    print_raw(name)
    if not wait:
        err.print(f"it answers when `maskfleet endpoint status {name}` is InService", markup=False)


@app.command("invoke")
def invoke(
    name: NameArgument,
    images: Annotated[
        list[str],
        typer.Argument(help="Images or videos: files, folders, patterns, addresses.", show_default=False),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the drawn images and detections.json.")
    ] = Path("predictions"),
    score: Annotated[float, typer.Option(min=0, max=1, help="Draw detections above this score.")] = 0.5,
    at_once: Annotated[int, typer.Option(min=1, max=10, help="Images to send at the same time.")] = 4,
    region: RegionOption = None,
) -> None:
    """Send IMAGES to the endpoint NAME; write what `maskfleet predict` writes.

    An image that cannot be used is reported, and the others are still done; the exit code is then 2.
    """
    from maskfleet.cli.predict import draw_all, expect_outputs
    from maskfleet.inference.sources import find_sources
    from maskfleet.launch.sagemaker.endpoint.invoke import EndpointClient
    from maskfleet.launch.sagemaker.services import Services
    from maskfleet.serve.client import RemoteModel

    sources = find_sources(images)
    expect_outputs(sources, out_dir)
    client = EndpointClient(Services(region), name)
    model = RemoteModel(client.send, at_once=at_once, max_bytes=client.max_bytes, size_remedy=client.size_remedy)
    try:
        draw_all(model, sources, out_dir, score)
    finally:
        model.close()


@app.command("status")
def status(name: NameArgument, as_json: JsonOption = False, region: RegionOption = None) -> None:
    """Show the state of the endpoint NAME, and why it failed; the exit code is 1 unless it answers."""
    from maskfleet.launch.sagemaker.endpoint.state import ANSWERS, explained, needed, status_of
    from maskfleet.launch.sagemaker.services import Services

    services = Services(region)
    endpoint = needed(services, name)
    found = status_of(services, endpoint)
    if as_json:
        print_raw(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
        if found.reason:
            out.print(explained(services, endpoint), markup=False)
    raise typer.Exit(0 if found.state in ANSWERS else 1)


@app.command("list")
def list_(as_json: JsonOption = False, region: RegionOption = None) -> None:
    """List the endpoints that maskfleet deployed in the region, the newest first."""
    from maskfleet.launch.sagemaker.endpoint.state import our_endpoints
    from maskfleet.launch.sagemaker.services import Services

    services = Services(region)
    found = list(our_endpoints(services))
    if as_json:
        print_raw(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
        return
    if not found:
        err.print(f"maskfleet has no endpoint in {services.region}", markup=False)
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        out.print(f"{one.name:{width}}  {one.state:10}  {one.created}  {one.kind}, {one.instances}", markup=False)


@app.command("delete")
def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    region: RegionOption = None,
) -> None:
    """Delete the endpoint NAME with its configurations and models, if maskfleet made them; archives stay in S3."""
    from maskfleet.cli.infra_view import TerminalView
    from maskfleet.launch.sagemaker.endpoint.remove import owned, remove_all
    from maskfleet.launch.sagemaker.endpoint.request import refuse_bad_name
    from maskfleet.launch.sagemaker.services import Services

    refuse_bad_name(name)
    services = Services(region)
    found = owned(services, name)
    if not found:
        err.print(f"nothing of {name} is in {services.region}", markup=False)
        return
    listed = ", ".join(map(str, found))
    if not TerminalView(yes=yes).confirm(f"delete {listed}?"):
        raise LaunchError(f"{name} was not deleted", remedy="answer y, or give --yes")
    remove_all(services, found, _say)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The model that the user chose."""

    source: str
    best: bool
    last: bool
    step: int | None

    @property
    def is_job(self) -> bool:
        return "://" in self.source


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the endpoint gets what it needs, if the user says so."""

    stack: str | None
    image: str | None
    role: str | None
    upload: str | None


@dataclass(frozen=True, slots=True)
class _Deployment:
    """An endpoint to be, and the archive to upload before it is created."""

    spec: EndpointSpec
    archive: Path | None
    upload: str | None  # S3 prefix for what belongs to endpoints

    def prefix(self) -> str:
        return _needed_prefix(self.upload)


def _services(choice: _Choice, region: str | None) -> Services:
    """Clients of the region of the job, or else of `region`."""
    from maskfleet.launch.backend import parse_handle
    from maskfleet.launch.sagemaker.services import Services

    if not choice.is_job:
        return Services(region)
    handle = parse_handle(choice.source)
    if handle.on != "sagemaker":
        raise ConfigError(
            f"{handle} is no job on SageMaker",
            remedy=f"copy it with `maskfleet fetch {handle}`, and deploy the run directory that you get",
        )
    if region not in (None, handle.location):
        raise ConfigError(f"{handle} is in {handle.location}, not in {region}", remedy="leave --region out")
    return Services(handle.location)


def _deployment(
    services: Services,
    name: str,
    choice: _Choice,
    places: _Places,
    instance: str,
    serverless: int | None,
    folder: Path,
) -> _Deployment:
    """The endpoint with the model of `choice`; what the user names wins over the stack, and the stack over the job."""
    from maskfleet.launch.backend import parse_handle
    from maskfleet.launch.sagemaker import stack as stacks
    from maskfleet.launch.sagemaker.endpoint.model import job_model, uploaded_uri
    from maskfleet.launch.sagemaker.endpoint.request import GPU_AMI, EndpointSpec, is_gpu_type, refuse_bad_name

    refuse_bad_name(name)
    outputs = stacks.outputs_of(services, places.stack) if places.stack else {}
    upload = places.upload or outputs.get(stacks.DATA)
    job, archive, environment = None, None, {}
    if choice.is_job:
        job = job_model(services, parse_handle(choice.source))
        environment = _step_of_job(choice)
        model_uri = job.uri
    else:
        archive = _packed(choice, folder)
        model_uri = uploaded_uri(archive, name, _needed_prefix(upload))
    subnets, groups = (job.subnets, job.security_groups) if job else ((), ())
    if stacks.SUBNETS in outputs:
        subnets, groups = stacks.listed(outputs[stacks.SUBNETS]), stacks.listed(outputs[stacks.GROUPS])
    uses_gpu = serverless is None and is_gpu_type(instance)
    spec = EndpointSpec(
        name=name,
        model_uri=model_uri,
        image=places.image or (job.image if job else _newest_image(services.region, cpu=not uses_gpu)),
        role_arn=_role(places, outputs, job.role_arn if job else None),
        instance=instance,
        subnets=subnets,
        security_groups=groups,
        environment=tuple(environment.items()),
        serverless_mib=serverless,
        ami=GPU_AMI if uses_gpu else None,
    )
    return _Deployment(spec, archive, upload)


def _packed(choice: _Choice, folder: Path) -> Path:
    """model.tar.gz in `folder` with the weights of a run directory or weights file of this machine."""
    from maskfleet.inference.load import load
    from maskfleet.launch.sagemaker.endpoint.model import ARCHIVE, WEIGHTS, pack
    from maskfleet.model.weights import labels_of, save_weights

    checkpoint = chosen_checkpoint(best=choice.best, last=choice.last, step=choice.step)
    detector = load(choice.source, "cpu", checkpoint=checkpoint)
    weights, archive = folder / WEIGHTS, folder / ARCHIVE
    labels = labels_of(detector.run, detector.categories)
    save_weights(weights, detector.model.state_dict(), detector.run.model, labels)
    err.print(f"packing {detector.source}", markup=False)
    pack(weights, archive)
    return archive


def _step_of_job(choice: _Choice) -> dict[str, str]:
    """The variable that selects a checkpoint in a job's archive; without one it is the best, or else the newest."""
    chosen_checkpoint(best=choice.best, last=choice.last, step=choice.step)
    if choice.last:
        raise ConfigError(
            "the newest checkpoint of a job can be chosen only by its number",
            remedy=f"give --step N; `maskfleet fetch {choice.source}` copies the checkpoints",
        )
    return {} if choice.step is None else {"MASKFLEET_STEP": str(choice.step)}


def _role(places: _Places, outputs: dict[str, str], of_job: str | None) -> str:
    from maskfleet.launch.sagemaker.stack import HOSTING_ROLE

    if places.stack and HOSTING_ROLE not in outputs and not places.role:
        raise LaunchError(
            f"stack {places.stack} has no role for endpoints (output {HOSTING_ROLE})",
            remedy="update it with `maskfleet infra up sagemaker`, or name a role with --role",
        )
    found = places.role or outputs.get(HOSTING_ROLE) or of_job
    if found is None:
        raise ConfigError("the endpoint has no role", remedy="give --stack NAME or --role ARN")
    return found


def _newest_image(region: str, *, cpu: bool) -> str:
    from maskfleet.infra.images.newest import newest_image

    found = newest_image(region=region, cpu=cpu, env=os.environ)
    err.print(f"image {found.reference}, pushed {found.pushed_at}", markup=False)
    return found.reference


def _needed_prefix(upload: str | None) -> str:
    if upload is None or not upload.startswith("s3://"):
        raise ConfigError(
            "there is no S3 prefix to write to", remedy="give --stack NAME or --upload s3://bucket/prefix"
        )
    return upload.rstrip("/")


def _score(score: float | None) -> dict[str, Any]:
    return {} if score is None else {"MASKFLEET_SCORE": f"{score:g}"}


def _print(found: EndpointStatus) -> None:
    out.print(f"{found.name}: {found.state}, created {found.created} UTC", markup=False)
    out.print(f"  {found.kind}, {found.instances}", markup=False)
    out.print(f"  model {found.model_uri or 'unknown'}", markup=False)
    out.print(f"  image {found.image or 'unknown'}", markup=False)
    for name, value in found.environment.items():
        out.print(f"  {name}={value}", markup=False)
    if not found.is_ours:
        out.print("  not made by maskfleet", markup=False)


def _say(text: str) -> None:
    err.print(text, markup=False)
