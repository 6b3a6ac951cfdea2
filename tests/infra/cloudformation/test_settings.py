"""cluster.yaml: which settings are accepted, and what they become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from maskfleet.cli.infra_stack import StackOptions, _session
from maskfleet.errors import ConfigError
from maskfleet.infra.cloudformation.kinds.ec2 import EC2, PARAMETERS, Ec2Cluster
from maskfleet.infra.cloudformation.session import TEMPLATE_LIMIT, read_settings
from maskfleet.infra.costs import estimate, read_prices
from maskfleet.launch.instances import INSTANCES

GOOD = "name: fleet\nregion: us-west-2\ns3_bucket: data\nkey_name: me\n"
VPC = "vpc_id: vpc-0123456789abcdef0\nprivate_subnet_id: subnet-01234567\n"


def settings(tmp_path: Path, text: str) -> Ec2Cluster:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    found = read_settings(file, EC2)
    assert isinstance(found, Ec2Cluster)
    return found


def test_every_parameter_of_the_template_is_a_setting_with_the_same_default() -> None:
    template = YAML(typ="rt", pure=True).load(EC2.template_file().read_text("utf-8"))
    assert tuple(template["Parameters"]) == PARAMETERS
    fields = {name.replace("_", ""): info for name, info in Ec2Cluster.model_fields.items()}
    assert set(fields) == {"name", "region", *(parameter.lower() for parameter in PARAMETERS)}
    for parameter in PARAMETERS:
        field, default = fields[parameter.lower()], template["Parameters"][parameter].get("Default")
        assert field.is_required() == (default is None), parameter
        assert field.is_required() or field.default in (None, default), parameter
        assert field.description, parameter
    assert set(EC2.outputs) <= set(template["Outputs"])
    assert len(EC2.template_file().read_bytes()) <= TEMPLATE_LIMIT


def test_only_what_is_set_or_has_a_default_of_ours_is_sent(tmp_path: Path) -> None:
    found = settings(tmp_path, GOOD + "worker_count: 4\nssh_cidr: 203.0.113.7/32\nroot_volume_gib: 300\n").parameters()
    assert found["S3Bucket"] == "data"
    assert found["WorkerCount"] == "4"
    assert found["RootVolumeGiB"] == "300"
    assert found["SshCidr"] == "203.0.113.7/32"
    assert "AmiId" not in found
    assert "Name" not in found


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("ssh_cidr: 0.0.0.0/0", "5: ssh_cidr: 0.0.0.0/0 is the whole internet"),
        ("ssh_cidr: 203.0.113.7/24", "203.0.113.7/24 is an address, .* write 203.0.113.0/24"),
        ("ssh_cidr: 203.0.113/32", "is not an IPv4 range"),
        ("ssh_cidr: ::/0", "is not an IPv4 range"),
        ("vpc_cidr: 10.0.0.0/8", "must be a range from /16 to /28"),
        ("private_subnet_cidr: 10.1.0.0/20", "10.1.0.0/20 is not inside of vpc_cidr"),
        ("private_subnet_cidr: 10.0.0.0/20", "overlap"),
        ("worker_cuont: 4", "there is no setting worker_cuont; did you mean worker_count?"),
        ("worker_count: many", "worker_count = 'many'"),
        ("min_worker_count: 3", "min_worker_count 3 is more than worker_count 2"),
        ("worker_instance_type: p5", "worker_instance_type = 'p5'"),
        ("efs_id: fs-123", "efs_id = 'fs-123'"),
        ("lustre_storage_gib: 1000", "1000 is not a size of FSx for Lustre"),
        ("purchase_option: capacity-block", "needs capacity_reservation_id"),
        ("availability_zone: us-east-1a", "availability_zone us-east-1a is not in region us-west-2"),
        ("private_subnet_id: subnet-01234567", "set vpc_id too"),
        ("vpc_id: vpc-01234567", "vpc_id needs private_subnet_id"),
        (f"{VPC}ssh_cidr: 203.0.113.7/32", "set public_subnet_id too"),
        ("efs_security_group_id: sg-01234567", "set efs_id too"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        settings(tmp_path, f"{GOOD}{line}\n")


def test_commands_that_messages_advise_name_the_file(tmp_path: Path) -> None:
    """Without --config they would be refused."""
    (tmp_path / "my cluster.yaml").write_text(GOOD)
    session = _session(StackOptions("ec2", tmp_path / "my cluster.yaml", None))
    assert session.command("down") == f"maskfleet infra down ec2 --config '{tmp_path}/my cluster.yaml'"


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key_name is missing"):
        settings(tmp_path, "name: fleet\ns3_bucket: data\n")


@pytest.mark.parametrize("identity", ["fs-01234567", "fs-0123456789abcdef0"])
def test_ids_of_either_length_are_accepted(tmp_path: Path, identity: str) -> None:
    assert settings(tmp_path, f"{GOOD}efs_id: {identity}\n").parameters()["EfsId"] == identity


def test_the_cost_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    more = "worker_instance_type: p5.48xlarge\nworker_count: 4\nssh_cidr: 203.0.113.7/32\nlustre_storage_gib: 2400\n"
    lines = estimate(settings(tmp_path, GOOD + more).billed(), read_prices(), region="us-west-2")
    amounts = [float(match[1]) for line in lines if (match := re.match(r" +([0-9.]+)  ", line))]
    # 4 workers, head, 5 disks of 200 GiB, NAT, 2 addresses, 2400 GiB Lustre
    assert amounts[:-1] == [220.16, 0.192, round(1000 * 0.08 / 730, 4), 0.045, 0.01, round(2400 * 0.14 / 730, 4)]
    assert amounts[-1] == pytest.approx(sum(amounts[:-1]), abs=1e-3)
    assert "us-east-1 of 2025-06" in lines[0]
    assert "  us-east-1, not us-west-2: prices there differ" in lines


def test_without_a_price_the_item_is_named(tmp_path: Path) -> None:
    lines = estimate(
        settings(tmp_path, GOOD + "worker_instance_type: p5e.48xlarge\n").billed(), read_prices(), region="us-east-1"
    )
    assert "  no price is known for 2 × p5e.48xlarge" in lines


def test_prices_of_instances_are_those_of_launch() -> None:
    table = read_prices().table["instance_hour"]
    known = {name: one.usd_per_hour for name, one in INSTANCES.items() if one.usd_per_hour is not None}
    assert known.items() <= table.items()


def test_a_file_replaces_the_prices(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('date = "2026-11"\nregion = "eu-west-1"\n[hour]\nnat_gateway = 0.05\n')
    prices = read_prices(file)
    assert (prices.date, prices.region, prices.per_hour("hour/nat_gateway")) == ("2026-11", "eu-west-1", 0.05)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('region = "x"\n', "does not say its date and region"),
        ('date = "d"\nregion = "x"\n[hours]\na = 1\n', "unknown part 'hours'"),
        ('date = "d"\nregion = "x"\n[hour]\nnat_gateway = -1\n', "nat_gateway = -1 is not a price"),
        ('date = "d"\nregion = "x"\nhour = 3\n', "hour is not a table of prices"),
        ('date = "d"\nregion = "x"\nsources = 3\n', "sources is not a list of texts"),
        ("date = \n", "cannot read the prices"),
    ],
)
def test_a_wrong_file_of_prices_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_prices(file)
