"""Checks of a job's execution role: whether SageMaker may assume it, and what it may do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from maskfleet.config.launch import SageMakerLaunch
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.checks.image import TrainingImage
from maskfleet.launch.sagemaker.checks.network import PLACE, lacking, unless_denied
from maskfleet.launch.sagemaker.logs import GROUP
from maskfleet.launch.sagemaker.services import Json, Services
from maskfleet.system.aws import aws_exceptions, code_of

_PRINCIPAL = "sagemaker.amazonaws.com"
_IAM = "iam:GetRole and iam:SimulatePrincipalPolicy on the role"


def role_finding(services: Services, arn: str, needs: Iterable[NeededPermission], *, field: str) -> Finding:
    """Whether the role `arn` exists, is one of SageMaker's, and has the permissions `needs`; `field` sets it."""
    name = "role"

    def check() -> Finding:
        iam = services.client("iam")
        try:
            role = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
        except aws_exceptions() as error:
            if code_of(error) not in ("NoSuchEntity", "NoSuchEntityException"):
                raise
            return lacking(name, "missing", f"there is no role {arn}", f"check {field} and the account")
        if not _trusts_sagemaker(role.get("AssumeRolePolicyDocument", {})):
            what = f"the trust policy of {arn} does not let {_PRINCIPAL} assume it"
            return lacking(name, "not for SageMaker", what, f"allow sts:AssumeRole to {_PRINCIPAL} in its trust policy")
        missing = [
            f"{result['EvalActionName']} on {result.get('EvalResourceName', '*')}"
            for need in needs
            for result in iam.simulate_principal_policy(PolicySourceArn=arn, **need.question())["EvaluationResults"]
            if result["EvalDecision"] != "allowed"
        ]
        if missing:
            what = f"{arn} may not {', '.join(missing)}"
            return lacking(name, "lacks permissions", what, "allow them in a policy of the role")
        return Finding(PLACE, name, Verdict.OK, f"{arn} has the permissions it needs")

    return unless_denied(name, _IAM, check)


@dataclass(frozen=True, slots=True)
class NeededPermission:
    """Actions on resources that a role must allow; `prefix` is what is listed of a bucket."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    prefix: str | None = None

    def question(self) -> Json:
        """Arguments of SimulatePrincipalPolicy; policies often limit the listing of a bucket to a prefix."""
        key = {"ContextKeyName": "s3:prefix", "ContextKeyValues": [self.prefix], "ContextKeyType": "string"}
        context = {} if self.prefix is None else {"ContextEntries": [key]}
        return {"ActionNames": list(self.actions), "ResourceArns": list(self.resources), **context}


def needed_permissions(launch: SageMakerLaunch, region: str) -> Iterator[NeededPermission]:
    """What the role of a job needs, on the very resources of the job: least-privilege policies name them."""
    _, partition, _, _, account, _ = (launch.role_arn or "arn:aws:iam:::").split(":", 5)
    read = {one.uri.rstrip("/") for one in launch.channels if one.source == "s3"}
    written = {uri.rstrip("/") for uri in (launch.output_uri, launch.checkpoint_uri) if uri}
    for uri in sorted(read | written):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        place = f"arn:{partition}:s3:::{bucket}"
        yield NeededPermission(("s3:ListBucket",), (place,), f"{prefix}/" if prefix else "")
        actions = ("s3:GetObject", "s3:PutObject") if uri in written else ("s3:GetObject",)
        yield NeededPermission(actions, (f"{place}/{prefix}/*" if prefix else f"{place}/*",))
    place = f"arn:{partition}:logs:{region}:{account}:log-group:{GROUP}:log-stream:job/algo-1"
    yield from container_permissions(launch.image or "", place, in_vpc=bool(launch.subnets))


def container_permissions(image: str, log_stream: str, *, in_vpc: bool) -> Iterator[NeededPermission]:
    """What a role needs so that SageMaker runs `image` with it and writes its output to `log_stream`, an ARN."""
    _, partition, _, region, account, _ = log_stream.split(":", 5)
    found = TrainingImage.parse(image)
    if found is not None:
        yield NeededPermission(("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"), (found.arn(partition),))
        yield NeededPermission(("ecr:GetAuthorizationToken",), ("*",))
    yield NeededPermission(("logs:CreateLogStream", "logs:PutLogEvents"), (log_stream,))
    if in_vpc:
        interface = f"arn:{partition}:ec2:{region}:{account}:network-interface/*"
        yield NeededPermission(("ec2:CreateNetworkInterface",), (interface,))
        yield NeededPermission(("ec2:DescribeNetworkInterfaces", "ec2:DescribeSubnets"), ("*",))


def _trusts_sagemaker(policy: str | Json) -> bool:
    document = json.loads(unquote(policy)) if isinstance(policy, str) else policy
    statements = document.get("Statement", [])
    for one in statements if isinstance(statements, list) else [statements]:
        principal = one.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, dict) else []
        if one.get("Effect") == "Allow" and _PRINCIPAL in ([services] if isinstance(services, str) else services):
            return True
    return False
