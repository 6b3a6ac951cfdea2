"""The Kubernetes client: which cluster it talks to, how long it waits, what its errors say."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from maskfleet.system.kube import client
from maskfleet.system.kube.client import ApiError, Kube
from maskfleet.system.kube.fake import FakeKube


def kubeconfig(server: str, **user: Any) -> dict[str, Any]:
    return {
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "it", "user": user}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }


def exec_user(*argv: str) -> dict[str, Any]:
    program, *arguments = argv
    return {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": program, "args": arguments}


def test_a_given_kubeconfig_overrides_the_one_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    with FakeKube(tmp_path) as mine, FakeKube(tmp_path / "other") as other:
        monkeypatch.setenv("KUBECONFIG", str(other.kubeconfig))
        config = kubeconfig(mine.url, token="t")
        with Kube(kubeconfig=config, namespace="default") as kube:
            assert kube.items("/api/v1/services") == []
        assert ("GET", "/api/v1/services?limit=500") in mine.requests
        assert other.requests == []
        assert config == kubeconfig(mine.url, token="t")


def test_a_given_kubeconfig_without_a_cluster_does_not_fall_back_to_the_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of the pod")
    monkeypatch.setattr("kr8s._auth.os.path.isdir", lambda path: pytest.fail(f"looked for {path}"))
    config = kubeconfig("")
    with (
        Kube(kubeconfig=config, namespace="default") as kube,
        pytest.raises(ApiError, match="does not name a cluster: Unable to find valid credentials"),
    ):
        kube.version()


def test_connecting_to_a_server_that_never_answers_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = kubeconfig(f"http://127.0.0.1:{silent.getsockname()[1]}", token="t")
        with (
            Kube(kubeconfig=config, namespace="default") as kube,
            pytest.raises(ApiError, match=r"cannot be reached: no answer within 0 s") as caught,
        ):
            kube.version()
    assert caught.value.status == 0


def test_a_request_that_is_never_answered_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeKube(tmp_path) as api, Kube(kubeconfig=kubeconfig(api.url, token="t"), namespace="kubeflow") as kube:
        assert kube.items("/api/v1/services") == []
        api.open_logs.add("quiet")  # whose log stays open without a line
        monkeypatch.setattr(client, "REQUEST_S", 0.3)
        with pytest.raises(ApiError, match="no answer within 0 s"):
            kube.get("/api/v1/namespaces/kubeflow/pods/quiet/log", follow="true")


def test_a_credentials_program_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_S", 0.3)
    config = kubeconfig("http://127.0.0.1:9", exec=exec_user("sleep", "600"))
    with Kube(kubeconfig=config, namespace="default") as kube, pytest.raises(ApiError, match="no answer within 0 s"):
        kube.version()


def test_the_error_of_a_credentials_program_is_quoted() -> None:
    config = kubeconfig("http://127.0.0.1:9", exec=exec_user("sh", "-c", "echo expired >&2; exit 3"))
    with Kube(kubeconfig=config, namespace="default") as kube, pytest.raises(ApiError, match="expired") as caught:
        kube.version()
    assert caught.value.status == 401


def test_deleting_a_missing_object_is_no_error(tmp_path: Path) -> None:
    with FakeKube(tmp_path) as api, Kube(kubeconfig=kubeconfig(api.url, token="t"), namespace="kubeflow") as kube:
        api.add_at("/api/v1/namespaces/kubeflow/services/nb")
        kube.delete("/api/v1/namespaces/kubeflow/services/nb")
        kube.delete("/api/v1/namespaces/kubeflow/services/nb")
        assert api.deleted == ["/api/v1/namespaces/kubeflow/services/nb"]


@pytest.mark.parametrize(
    ("status", "words"), [(403, "the cluster refused"), (503, "the cluster refused: it is broken")]
)
def test_a_rejected_deletion_is_an_error(status: int, words: str, tmp_path: Path) -> None:
    with FakeKube(tmp_path) as api, Kube(kubeconfig=kubeconfig(api.url, token="t"), namespace="kubeflow") as kube:
        assert kube.version() == "v1.35.0"
        api.refusal = status
        with pytest.raises(ApiError, match=words) as caught:
            kube.delete("/api/v1/namespaces/kubeflow/services/nb")
        assert caught.value.status == status
