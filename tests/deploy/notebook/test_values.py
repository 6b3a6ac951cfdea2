"""Values that the notebook chart rejects; the message names each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from notebook_release import GOOD, HASH, MD5, try_render

HOSTILE = [
    ("image", ""),
    ("image", "x y"),
    ("image", 'a"\nb'),
    ("image", 7),
    ("image_pull_policy", "Sometimes"),
    ("shared_fs", "fsx/../etc"),
    ("shared_fs", "etc"),
    ("shared_fs", "{{ .Values }}"),
    ("shared_pvc", "a" * 64),
    ("shared_pvc", "PV"),
    ("data_fs", "fsx"),
    ("data_fs", "usr"),
    ("data_pvc", "only-one"),
    ("log_dir", "../x"),
    ("log_dir", "a/../../x"),
    ("log_dir", "/fsx/logs"),
    ("log_dir", 'a"b'),
    ("log_dir", "a\nb"),
    ("log_dir", "a b"),
    ("log_dir", "{{x}}"),
    ("log_dir", ""),
    ("work_dir", ".."),
    ("work_dir", "/x"),
    ("gpu_instance_type", "g5"),
    ("gpu_instance_type", "g5.xlarge\nfoo: bar"),
    ("user", ""),
    ("user", "a:b"),
    ("user", "a\nb"),
    ("htpasswd", ""),
    ("htpasswd", MD5),
    ("htpasswd", "secret"),
    ("htpasswd", "$2b$04$" + HASH[7:]),
    ("htpasswd", HASH + "\nroot:x"),
    ("htpasswd", "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g="),
    ("existing_secret", "both"),
    ("existing_secret", "UPPER"),
    ("source_cidr", "0.0.0.0/0"),
    ("source_cidr", "::/0"),
    ("source_cidr", "0.0.0.0/1"),
    ("source_cidr", "10.0.0.0/7"),
    ("source_cidr", "2001::/16"),
    ("source_cidr", "10.0.0.1"),
    ("source_cidr", "300.0.0.0/8"),
    ("source_cidr", "10.0.0.0/33"),
    ("source_cidr", "10.0.0.0/8\n- 0.0.0.0/0"),
    ("source_cidr", ["203.0.113.7/32", "0.0.0.0/0"]),
    ("source_cidr", []),
    ("source_cidr", True),
    ("load_balancer_scheme", "public"),
    ("tls", {"existing_secret": "a", "issuer": "b"}),
    ("tls", {"hosts": ["a b"]}),
    ("tls", {"issuer_kind": "Any"}),
    ("allow_egress", "yes"),
    ("jupyter", {"memory_gib": "lots"}),
    ("jupyter", {"cpu": 8}),
    ("jupyter", {"token": "x"}),
    ("tensorboard", {"port": 80}),
    ("proxy", {"port": 443}),
    ("proxy", {"bind": "localhost; allow all"}),
    ("proxy", {"config_dir": "/etc/../x"}),
    ("proxy", {"run_dir": "/run; x"}),
    ("node_selector", {"a": 1}),
    ("tolerations", "all"),
    ("shared_fss", "fsx"),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=lambda part: re.sub(r"\W+", "_", str(part))[:30])
def test_a_bad_value_is_rejected_by_name(tmp_path: Path, field: str, value: Any) -> None:
    done = try_render(tmp_path, {**GOOD, field: value})
    assert done.returncode != 0
    assert field in done.stderr
    for key in value if isinstance(value, dict) else ():
        assert key.split("_")[0] in done.stderr


# The templates reject the dangerous ones again, for users who turn the schema off.
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("htpasswd", MD5),
        ("source_cidr", "0.0.0.0/0"),
        ("source_cidr", "::/0"),
        ("source_cidr", ["8.0.0.0/5"]),
        ("image", ""),
    ],
)
def test_dangerous_values_are_rejected_without_the_schema(tmp_path: Path, field: str, value: Any) -> None:
    done = try_render(tmp_path, {**GOOD, field: value}, "--skip-schema-validation")
    assert done.returncode != 0
    assert f"{field}: " in done.stderr


@pytest.mark.parametrize("name", ["a" * 41, "50-epochs", "a.b"])
def test_a_release_name_that_is_no_service_name_is_rejected_by_name(tmp_path: Path, name: str) -> None:
    assert try_render(tmp_path, GOOD, name="a" * 40).returncode == 0
    done = try_render(tmp_path, GOOD, name=name)
    assert done.returncode != 0
    assert "Release.Name" in done.stderr
