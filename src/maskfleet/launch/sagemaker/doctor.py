"""Can SageMaker run the job of a launch section? Checks everything that can be known before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from maskfleet.config.launch import SageMakerChannel, SageMakerLaunch
from maskfleet.errors import LaunchError
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.checks.image import image_finding
from maskfleet.launch.sagemaker.checks.network import PLACE, lacking, network_findings, unless_denied
from maskfleet.launch.sagemaker.checks.quota import quota_finding
from maskfleet.launch.sagemaker.checks.role import needed_permissions, role_finding
from maskfleet.launch.sagemaker.services import Services
from maskfleet.launch.sagemaker.status import is_absent
from maskfleet.system.aws import aws_exceptions, code_of

_UNSET = "set it before you launch (docs/run-anywhere/sagemaker.md)"


def requirements(services: Services, launch: SageMakerLaunch) -> Iterator[Finding]:
    """Whether each requirement of the job is met, the ones that most often are not first."""
    yield image_finding(services, launch.image) if launch.image else _unset("image")
    for channel in launch.channels:
        if channel.source == "s3":
            yield _s3_channel(services, channel)
    if all(channel.name != "train" for channel in launch.channels):
        yield _unset("channel train")
    if launch.output_uri is None:
        yield _unset("output_uri")
    yield from _results(services, launch)
    if launch.role_arn:
        needs = needed_permissions(launch, services.region)
        yield role_finding(services, launch.role_arn, needs, field="launch.role_arn")
    else:
        yield _unset("role_arn")
    use = "spot training job usage" if launch.spot else "training job usage"
    yield quota_finding(services, launch.instance, use, launch.nodes, option="--nodes")
    if launch.warm_pool_s:
        yield _warm_pool(services, launch)
    if launch.experiment:
        yield _experiment(services, launch.experiment, launch.trial)
    yield from network_findings(services, launch)


def examine(services: Services, launch: SageMakerLaunch) -> list[Finding]:
    """All findings about the job that `launch` describes; nothing is created."""

    def who() -> Finding:
        found = services.client("sts").get_caller_identity()
        return Finding(PLACE, "AWS", Verdict.OK, f"{found['Arn']} in {services.region}")

    try:
        identity = unless_denied("AWS", "sts:GetCallerIdentity", who)
    except LaunchError as error:
        return [Finding(PLACE, "AWS", Verdict.FAIL, error.what, error.remedy)]
    return [identity, *requirements(services, launch)]


def refuse_unfit(services: Services, launch: SageMakerLaunch) -> None:
    """Raise for the first requirement that is not met."""
    for finding in requirements(services, launch):
        if finding.refusal:
            raise LaunchError(finding.refusal, remedy=finding.remedy)


def _unset(name: str) -> Finding:
    return Finding(PLACE, name, Verdict.FAIL, "not set", _UNSET, f"launch.{name} is not set")


def _results(services: Services, launch: SageMakerLaunch) -> Iterator[Finding]:
    """Whether the buckets for results exist: a job that trained for hours must not fail when it writes them."""
    known = {_bucket_and_folder(one.uri)[0] for one in launch.channels if one.source == "s3"}
    for name, uri in (("output_uri", launch.output_uri), ("checkpoint_uri", launch.checkpoint_uri)):
        if uri is not None and _bucket_and_folder(uri)[0] not in known:
            known.add(_bucket_and_folder(uri)[0])
            yield _s3_place(services, name, uri, f"launch.{name}", filled=False)


def _s3_channel(services: Services, channel: SageMakerChannel) -> Finding:
    """Whether the prefix has an object, in a bucket of the job's region."""
    return _s3_place(services, f"channel {channel.name}", channel.uri, "launch.channels", filled=True)


def _s3_place(services: Services, name: str, uri: str, field: str, *, filled: bool) -> Finding:
    """Whether the bucket of `uri` is in the job's region; if `filled`, also whether there are objects below `uri`."""
    bucket, folder = _bucket_and_folder(uri)
    other = "copy the data" if filled else f"name a bucket in {services.region} in {field}"

    def check() -> Finding:
        try:
            answer = services.client("s3").list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1)
        except aws_exceptions() as error:
            if code_of(error) == "NoSuchBucket":
                return lacking(name, "no such bucket", f"there is no bucket {bucket}", f"check {field}")
            if code_of(error) in ("PermanentRedirect", "301", "IllegalLocationConstraintException"):
                what = f"bucket {bucket} is not in {services.region}, where the job would run"
                return lacking(name, "in another region", what, f"launch in the bucket's region, or {other}")
            raise
        home = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", services.region)
        if home != services.region:
            what = f"bucket {bucket} is in {home}, but the job would run in {services.region}"
            return lacking(name, f"in {home}", what, f"launch in {home}, or {other}")
        if filled and not answer.get("Contents"):
            what = f"{uri}, the data of {name}, is empty"
            return lacking(name, "empty", what, "stage the data there (docs/data/staging.md), or correct the uri")
        return Finding(PLACE, name, Verdict.OK, f"{uri} has objects" if filled else f"bucket {bucket} exists")

    return unless_denied(name, f"s3:ListBucket on {bucket}", check)


def _bucket_and_folder(uri: str) -> tuple[str, str]:
    """The bucket of s3://bucket/prefix, and its prefix with a slash at the end unless it is empty."""
    bucket, _, prefix = uri.rstrip("/").removeprefix("s3://").partition("/")
    return bucket, f"{prefix}/" if prefix else ""


def _warm_pool(services: Services, launch: SageMakerLaunch) -> Finding:
    """Whether the quota of warm pools, which is 0 unless more was asked for, is enough to keep the instances.

    Without it SageMaker runs the job and keeps nothing, so that a launch is not refused.
    """
    found = quota_finding(services, launch.instance, "training warm pool usage", launch.nodes, option="--nodes")
    verdict = Verdict.WARN if found.verdict is Verdict.FAIL else found.verdict
    return replace(found, name="warm pool", verdict=verdict, refusal="")


def _experiment(services: Services, experiment: str, trial: str | None) -> Finding:
    """Whether the experiment and its trial exist: SageMaker does not create them with a job."""
    name = "experiment"

    def check() -> Finding:
        client = services.client("sagemaker")
        asked = f"experiment {experiment}"
        try:
            client.describe_experiment(ExperimentName=experiment)
            if trial is not None:
                asked = f"trial {trial}"
                found = client.describe_trial(TrialName=trial).get("ExperimentName", experiment)
                if found != experiment:
                    what = f"trial {trial} belongs to experiment {found}"
                    return lacking(name, what, f"{what}, not to {experiment}", "name one of the experiment's trials")
        except aws_exceptions() as error:
            if not is_absent(error):
                raise
            kind = asked.partition(" ")[0]
            own = f" --{kind}-name {asked.partition(' ')[2]}"
            of = f" --experiment-name {experiment}" if kind == "trial" else ""
            remedy = f"create it with `aws sagemaker create-{kind}{own}{of}`, or leave it out"
            return lacking(name, f"no {asked}", f"there is no {asked} in {services.region}", remedy)
        return Finding(PLACE, name, Verdict.OK, f"{experiment}{f', trial {trial}' if trial else ''}")

    return unless_denied(name, "sagemaker:DescribeExperiment and DescribeTrial", check)
