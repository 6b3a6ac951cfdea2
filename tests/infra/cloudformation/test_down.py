"""`down` and `status`: what is deleted, what remains and what it costs, with answers as AWS gives them."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_stack import ID, NOW, SMALL, Screen, StubbedAws, described, happened, has_change_sets, resources
from small_stack import TAGS as TAGS_OF_OURS

from maskfleet.errors import InfraError
from maskfleet.infra.cloudformation.down import StackDownOptions, down
from maskfleet.infra.cloudformation.status import stack_outputs, stack_status

TAGS = [{"Key": "aws:cloudformation:stack-name", "Value": "fleet"}]
EFS = {
    "OwnerId": "123456789012",
    "CreationToken": "x",
    "FileSystemId": "fs-0123456789abcdef0",
    "CreationTime": NOW,
    "LifeCycleState": "available",
    "NumberOfMountTargets": 0,
    "SizeInBytes": {"Value": 100 << 30},
    "PerformanceMode": "generalPurpose",
    "Tags": TAGS,
}
LUSTRE = {
    "FileSystemId": "fs-0fedcba9876543210",
    "FileSystemType": "LUSTRE",
    "Lifecycle": "AVAILABLE",
    "StorageCapacity": 1200,
    "LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250},
    "Tags": TAGS,
}
STRANGER = {**EFS, "FileSystemId": "fs-99999999", "Tags": [{"Key": "aws:cloudformation:stack-name", "Value": "other"}]}


def has_files(aws: StubbedAws, *, efs: list[Any], lustre: list[Any]) -> None:
    aws.answer("efs", "describe_file_systems", {"FileSystems": efs})
    aws.answer("fsx", "describe_file_systems", {"FileSystems": lustre})


def has_network(aws: StubbedAws, *vpcs: str) -> None:
    aws.answer("ec2", "describe_security_groups", {"SecurityGroups": []})
    aws.answer("ec2", "describe_subnets", {"Subnets": []})
    aws.answer("ec2", "describe_vpcs", {"Vpcs": [{"VpcId": vpc} for vpc in vpcs]})


def deletes(aws: StubbedAws, after: str, *events: str, listed: Any = None, **expected: Any) -> None:
    before = ("fleet CREATE_COMPLETE",)
    listed = listed or resources(
        "First AWS::SNS::Topic first-id CREATE_COMPLETE", "Files AWS::EFS::FileSystem fs-1 CREATE_COMPLETE"
    )
    aws.answer("cloudformation", "list_stack_resources", listed)
    aws.answer("cloudformation", "describe_stack_events", happened(*before))
    aws.answer("cloudformation", "delete_stack", {}, StackName=ID, **expected)
    aws.answer("cloudformation", "describe_stacks", described(after))
    aws.answer("cloudformation", "describe_stack_events", happened(*before, *events))


def test_down_keeps_the_data_and_says_what_it_costs(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    for _ in range(2):  # before and after the deletion
        has_files(stubbed, efs=[EFS, STRANGER], lustre=[LUSTRE])
    deletes(stubbed, "DELETE_COMPLETE", "First DELETE_COMPLETE", "Files DELETE_SKIPPED", "fleet DELETE_COMPLETE")
    has_network(stubbed, "vpc-1")
    down(screen.session(aws=stubbed), StackDownOptions())
    shown = screen.shown()
    assert "2 resources of stack fleet in us-east-1 will be deleted" in shown
    assert "CloudFormation kept, as the template says: Files" in shown
    assert "fs-0123456789abcdef0  EFS with 100.0 GiB, about 30.00 USD per month by prices of us-east-1" in shown
    assert "fs-0fedcba9876543210  FSx for Lustre of 1200 GiB (PERSISTENT_2), about 252.00 USD per month" in shown
    assert "  aws ec2 delete-vpc --vpc-id vpc-1 --region us-east-1" in shown
    assert "fs-99999999" not in shown
    assert shown.endswith("maskfleet infra down small --delete-data deletes them\n")


TEMPLATE = """
Resources:
  Efs: {Type: AWS::EFS::FileSystem, DeletionPolicy: RetainExceptOnCreate}
  Lustre: {Type: AWS::FSx::FileSystem, DeletionPolicy: Delete}
  Notebook: {Type: AWS::SageMaker::NotebookInstance}
"""


@pytest.mark.parametrize("delete_data", [False, True])
def test_down_says_what_is_lost_with_the_stack(
    stubbed: StubbedAws, screen: Screen, tmp_path: Path, delete_data: bool
) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(TEMPLATE, encoding="utf-8")
    session = replace(screen.session(aws=stubbed), kind=replace(SMALL, template=str(template)))
    efs, lustre = EFS["FileSystemId"], LUSTRE["FileSystemId"]
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    has_files(stubbed, efs=[EFS], lustre=[LUSTRE])
    listed = resources(
        f"Efs AWS::EFS::FileSystem {efs} CREATE_COMPLETE",
        f"Lustre AWS::FSx::FileSystem {lustre} CREATE_COMPLETE",
        "Notebook AWS::SageMaker::NotebookInstance nb-1 CREATE_COMPLETE",
    )
    deletes(stubbed, "DELETE_COMPLETE", "fleet DELETE_COMPLETE", listed=listed)
    has_files(stubbed, efs=[EFS], lustre=[{**LUSTRE, "Lifecycle": "DELETING"}])
    if delete_data:
        stubbed.answer("efs", "delete_file_system", {}, FileSystemId=efs)
    has_network(stubbed)
    down(session, StackDownOptions(delete_data=delete_data))
    before, _, after = screen.shown().partition("is deleted\n")
    lost, _, kept = before.partition("these file systems are kept:\n")
    assert "with all data in:\n" in lost
    assert f"  {lustre}  FSx for Lustre of 1200 GiB" in lost
    assert "  nb-1  notebook instance, with ~/SageMaker" in lost
    assert "what is on Lustre and was not exported to S3 is lost" in lost
    task = "aws fsx create-data-repository-task --type EXPORT_TO_REPOSITORY --report Enabled=false"
    assert f"  {task} --file-system-id {lustre} --region us-east-1\n" in lost
    assert (f"  {efs}  EFS" in lost, f"  {efs}  EFS" in kept) == (delete_data, not delete_data)
    assert f"{lustre} is deleted, and with it what was on it and not exported to S3" in after
    assert (f"deleting {efs} with all data in it" in after) == delete_data
    assert ("these file systems hold your data" in after) == (not delete_data)
    assert after.count(lustre) == 1


def test_data_is_deleted_on_request_also_after_the_stack(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.refuse("cloudformation", "describe_stacks", "ValidationError", "Stack with id fleet does not exist")
    has_files(stubbed, efs=[EFS], lustre=[LUSTRE])
    stubbed.answer("efs", "delete_file_system", {}, FileSystemId="fs-0123456789abcdef0")
    stubbed.answer("fsx", "delete_file_system", {}, FileSystemId="fs-0fedcba9876543210")
    has_network(stubbed)
    down(screen.session(aws=stubbed), StackDownOptions(delete_data=True))
    assert "deleting fs-0fedcba9876543210 with all data in it" in screen.shown()


def test_a_second_down_only_says_what_remains(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.refuse("cloudformation", "describe_stacks", "ValidationError", "Stack with id fleet does not exist")
    has_files(stubbed, efs=[EFS], lustre=[])
    has_network(stubbed)
    down(screen.session(aws=stubbed), StackDownOptions())
    shown = screen.shown()
    assert shown.startswith("nothing is left to remove")
    assert "fs-0123456789abcdef0" in shown


def test_what_blocks_a_deletion_is_named(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE"))
    has_files(stubbed, efs=[], lustre=[])
    reason = "The vpc 'vpc-1' has dependencies and cannot be deleted."
    deletes(stubbed, "DELETE_FAILED", f"First DELETE_FAILED {reason}", "fleet DELETE_FAILED")
    stubbed.answer(
        "cloudformation", "list_stack_resources", resources(f"Vpc AWS::EC2::VPC vpc-1 DELETE_FAILED {reason}")
    )
    interface = {
        "NetworkInterfaceId": "eni-1",
        "SubnetId": "subnet-1",
        "Status": "in-use",
        "Description": "EFS mount target for fs-7",
    }
    stubbed.answer(
        "ec2",
        "describe_network_interfaces",
        {"NetworkInterfaces": [interface]},
        Filters=[{"Name": "vpc-id", "Values": ["vpc-1"]}],
    )
    with pytest.raises(InfraError, match=r"failed at First .* has dependencies") as caught:
        down(screen.session(aws=stubbed), StackDownOptions())
    assert "maskfleet infra down small --force deletes the stack" in caught.value.remedy
    shown = screen.shown()
    assert f"not deleted: Vpc (AWS::EC2::VPC) vpc-1: {reason}" in shown
    assert "  eni-1 in subnet-1 (in-use; EFS mount target for fs-7)" in shown


def test_force_leaves_behind_what_cannot_be_deleted(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("DELETE_FAILED"))
    has_files(stubbed, efs=[], lustre=[])
    has_files(stubbed, efs=[], lustre=[])
    events = ("First DELETE_FAILED busy", "fleet DELETE_COMPLETE")
    deletes(stubbed, "DELETE_COMPLETE", *events, DeletionMode="FORCE_DELETE_STACK")
    has_network(stubbed)
    down(screen.session(aws=stubbed), StackDownOptions(force=True))
    assert "left behind, and perhaps billed: First (AWS::SNS::Topic) first-id: busy" in screen.shown()


def test_down_waits_for_an_update_to_end(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stack_events", happened("fleet UPDATE_IN_PROGRESS"))
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_COMPLETE"))
    ended = happened("fleet UPDATE_IN_PROGRESS", "fleet UPDATE_COMPLETE")
    stubbed.answer("cloudformation", "describe_stack_events", ended)
    has_files(stubbed, efs=[], lustre=[])
    has_files(stubbed, efs=[], lustre=[])
    deletes(stubbed, "DELETE_COMPLETE", "fleet DELETE_COMPLETE")
    has_network(stubbed)
    down(screen.session(aws=stubbed), StackDownOptions())
    assert "it can be deleted once that has ended" in screen.shown()


def test_a_wait_of_down_that_ends_says_that_down_continues_it(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    for _ in range(2):
        stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_IN_PROGRESS"))
        stubbed.answer("cloudformation", "describe_stack_events", happened("fleet UPDATE_IN_PROGRESS"))
    with pytest.raises(InfraError, match="still UPDATE_IN_PROGRESS after 0 s") as caught:
        down(screen.session(aws=stubbed), StackDownOptions(wait_s=0))
    assert caught.value.remedy == "maskfleet infra down small continues to wait; --wait SECONDS allows more time"


def test_a_protected_stack_is_not_deleted(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.identity()
    stubbed.answer("cloudformation", "describe_stacks", described("CREATE_COMPLETE", EnableTerminationProtection=True))
    has_files(stubbed, efs=[], lustre=[])
    with pytest.raises(InfraError, match="termination protection") as caught:
        down(screen.session(aws=stubbed), StackDownOptions())
    assert "--no-enable-termination-protection --stack-name fleet" in caught.value.remedy


def test_expired_credentials_are_found_before_anything_else(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.refuse("sts", "get_caller_identity", "ExpiredToken", "The security token included is expired")
    with pytest.raises(InfraError, match=r"does not accept the credentials in use \(ExpiredToken\)") as caught:
        down(screen.session(aws=stubbed), StackDownOptions())
    assert "aws sso login" in caught.value.remedy


def test_status_of_a_stack_that_is_well(stubbed: StubbedAws, screen: Screen) -> None:
    outputs = [{"OutputKey": key, "OutputValue": f"{key}-value"} for key in ("FilesId", "FirstArn")]
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_COMPLETE", Outputs=outputs))
    stubbed.answer(
        "cloudformation",
        "list_stack_resources",
        resources("First AWS::SNS::Topic a CREATE_COMPLETE", "Old AWS::SNS::Topic b DELETE_COMPLETE"),
    )
    found = stack_status(screen.session(aws=stubbed))
    assert (found.is_well, found.resources, found.types) == (True, 1, {"AWS::SNS::Topic": 1})
    stubbed.answer("cloudformation", "describe_stacks", described("UPDATE_COMPLETE", Outputs=outputs))
    assert stack_outputs(screen.session(aws=stubbed)) == {"FilesId": "FilesId-value", "FirstArn": "FirstArn-value"}


def test_status_says_why_a_stack_is_not_well(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.answer("cloudformation", "describe_stacks", described("ROLLBACK_COMPLETE"))
    stubbed.answer("cloudformation", "list_stack_resources", resources())
    events = ("fleet CREATE_IN_PROGRESS", "First CREATE_FAILED no such thing", "fleet ROLLBACK_COMPLETE")
    stubbed.answer("cloudformation", "describe_stack_events", happened(*events))
    found = stack_status(screen.session(aws=stubbed))
    assert not found.is_well
    assert found.detail == (
        "its creation failed; up deletes what is left of it and creates it again:"
        " First (AWS::SNS::Topic): no such thing"
    )


def test_status_and_outputs_of_no_stack(stubbed: StubbedAws, screen: Screen) -> None:
    for _ in range(2):
        stubbed.refuse("cloudformation", "describe_stacks", "ValidationError", "Stack with id fleet does not exist")
    found = stack_status(screen.session(aws=stubbed))
    assert (found.status, found.is_well) == ("", False)
    with pytest.raises(InfraError, match="does not exist"):
        stack_outputs(screen.session(aws=stubbed))


def test_a_stack_that_is_only_a_change_set_is_not_well(stubbed: StubbedAws, screen: Screen) -> None:
    stubbed.answer("cloudformation", "describe_stacks", described("REVIEW_IN_PROGRESS"))
    has_change_sets(stubbed, TAGS_OF_OURS)
    stubbed.answer("cloudformation", "list_stack_resources", resources())
    found = stack_status(screen.session(aws=stubbed))
    assert not found.is_well
    assert found.detail == "it is only a change set so far; maskfleet infra up small creates it"


def test_a_page_of_a_proxy_is_not_mistaken_for_an_answer(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"<!doctype html><html>Please sign in</html>")

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(InfraError, match=r"does not come from STS: .*Please sign in"):
                down(screen.session(), StackDownOptions())
        finally:
            server.shutdown()
