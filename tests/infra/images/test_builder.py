"""Which tool builds, what it is told, and what its failures mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_tools import DIGEST, IMAGE_ID, FakeTool, fake_tool

from maskfleet.errors import ConfigError, InfraError, MaskfleetError
from maskfleet.infra.images.build import BuildOptions, build
from maskfleet.infra.images.builder import Builder, find_builder
from maskfleet.infra.images.efa import PINNED
from maskfleet.infra.images.explain import explained
from maskfleet.infra.images.push import PushOptions, push
from maskfleet.infra.images.record import ImageJournal
from maskfleet.system.deploy_files import deploy_path
from maskfleet.system.process import Finished, RecordingShell

WHEEL = ("maskfleet-0-py3-none-any.whl", b"wheel")


@pytest.fixture
def tool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTool:
    """buildah, or the tool that a test's parameter names."""
    made = fake_tool(tmp_path, getattr(request, "param", "buildah"))
    monkeypatch.setenv("PATH", made.env["PATH"])
    return made


each_tool = pytest.mark.parametrize("tool", ["docker", "podman", "buildah"], indirect=True)


def built(tool: FakeTool, options: BuildOptions) -> list[str]:
    builder = Builder(tool.name, env=tool.env)
    return [image.name for image in build(options, WHEEL, builder, env=tool.env, say=lambda text: None)]


def test_the_first_tool_that_works_is_taken() -> None:
    shell = RecordingShell([Finished(1, err="Cannot connect to the Docker daemon"), Finished(0)])
    assert find_builder(None, env={}, run=shell).name == "podman"
    assert [argv[0] for argv, _ in shell.calls] == ["docker", "podman"]


def test_without_a_tool_every_reason_is_given() -> None:
    def nothing(argv: list[str], stdin: str = "", *, timeout_s: float = 60) -> Finished:
        if argv[0] == "docker":
            return Finished(1, err="Cannot connect to the Docker daemon\n")
        raise MaskfleetError(f"{argv[0]} is not installed here", remedy="install it")

    with pytest.raises(InfraError) as caught:
        find_builder(None, env={}, run=nothing)  # type: ignore[arg-type]
    for reason in ("Cannot connect to the Docker daemon", "podman is not installed", "buildah is not installed"):
        assert reason in caught.value.what
    with pytest.raises(InfraError, match="kaniko cannot build"):
        find_builder("kaniko", env={})


@each_tool
def test_a_build_for_cpus_has_no_efa_and_is_marked(tool: FakeTool) -> None:
    [name] = built(tool, BuildOptions(gpu=False, base="example.org/base:1"))
    assert "-cpu-" in name
    assert name.endswith(IMAGE_ID[:12])
    [call] = tool.calls("build")
    arguments = [text for option, text in zip(call["argv"], call["argv"][1:], strict=False) if option == "--build-arg"]
    assert "GPU=0" in arguments
    assert "BASE=example.org/base:1" in arguments
    assert "PIP_ARGS=" in arguments
    assert not any(text.startswith("EFA_INSTALLER") for text in arguments)
    assert ("--timestamp" in call["argv"]) == (tool.name != "docker")
    record = ImageJournal(tool.env)
    assert record.built("train").image_id == IMAGE_ID  # type: ignore[union-attr]
    assert list(record.folder.glob("context-*")) == []


@each_tool
def test_images_have_the_manifest_that_sagemaker_accepts(tool: FakeTool) -> None:
    """BuildKit 0.31 makes OCI's by default; podman and buildah convert when they push."""
    built(tool, BuildOptions(gpu=False))
    [call] = tool.calls("build")
    argv = call["argv"]
    if tool.name == "docker":
        assert argv[argv.index("--output") + 1] == "type=image,oci-mediatypes=false"
        return
    assert "--output" not in argv
    push(PushOptions(to="ghcr.io/us/maskfleet"), Builder(tool.name, env=tool.env), env=tool.env, say=lambda text: None)
    [call] = tool.calls("push")
    assert call["argv"][call["argv"].index("--format") + 1] == "v2s2"


def test_the_context_has_what_the_dockerfiles_name_and_nothing_else(tool: FakeTool, tmp_path: Path) -> None:
    installer = tmp_path / "aws-efa-installer-9.9.tar.gz"
    installer.write_bytes(b"installer")
    names = built(tool, BuildOptions(efa_installer=installer, notebook=True))
    assert [name.endswith("-notebook") for name in names] == [False, True]
    context = set(json.loads((tool.folder / "context.json").read_text()))
    assert {name.partition("/")[0] for name in context} == {"deploy", "notebooks", "dist", installer.name}
    assert {"deploy/docker/constraints.txt", f"dist/{WHEEL[0]}", "notebooks/try_model.ipynb"} <= context
    train, notebook = tool.calls("build")
    assert f"EFA_INSTALLER={installer.name}" in train["argv"]
    assert f"TRAIN_IMAGE={names[0]}" in notebook["argv"]


def test_compiled_code_is_in_the_context_under_the_names_for_runs(tool: FakeTool, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"code")
    built(tool, BuildOptions(gpu=False, compiled={"0123.cache": tmp_path / "mine"}))
    context = set(json.loads((tool.folder / "context.json").read_text()))
    assert {name for name in context if name.startswith("compiled/")} == {"compiled/0123.cache"}


def test_a_damaged_copy_of_the_pinned_installer_is_refused(tool: FakeTool, tmp_path: Path) -> None:
    copy = tmp_path / PINNED.name
    copy.write_bytes(b"not it")
    with pytest.raises(InfraError, match="has the SHA-256") as caught:
        built(tool, BuildOptions(efa_installer=copy))
    assert PINNED.url in caught.value.remedy
    with pytest.raises(InfraError, match="no file"):
        built(tool, BuildOptions(efa_installer=tmp_path / "none.tar.gz"))
    assert tool.calls("build") == []


def test_a_wrong_time_is_refused(tool: FakeTool) -> None:
    builder = Builder(tool.name, env=tool.env)
    env = {**tool.env, "SOURCE_DATE_EPOCH": "yesterday"}
    with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH"):
        build(BuildOptions(gpu=False), WHEEL, builder, env=env, say=lambda text: None)


def test_a_full_disk_is_explained(tool: FakeTool) -> None:
    tool.answer("build", "Error: committing: write /var/lib/layer.tar: no space left on device", code=125)
    with pytest.raises(InfraError, match="the disk is full") as caught:
        built(tool, BuildOptions(gpu=False))
    assert tool.name in caught.value.remedy
    assert "layer.tar: no space left" in caught.value.what


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("sha256sum: WARNING: 1 computed checksum did NOT match", "checksum"),
        ("the EFA installer has no aws-ofi-nccl for this base image", "NCCL would use TCP"),
        ("denied: Your authorization token has expired. Reauthenticate and try again.", "has expired"),
        ("no basic auth credentials", "refused the login"),
        ("E: Failed to fetch http://mirror.example/x  Temporary failure resolving", "could not be reached"),
        ("toomanyrequests: You have reached your pull rate limit", "limits how often"),
        ("manifest unknown: manifest unknown", "base image was not found"),
        ("ERROR: No matching distribution found for torch==9", "no version of a package"),
        ("tag invalid: The image tag '1' already exists and cannot be overwritten", "does not let tags change"),
        ("something else", "the build failed"),
    ],
)
def test_the_output_of_a_tool_is_explained(output: str, cause: str) -> None:
    error = explained(f"STEP 1\n{output}\n", "buildah", "the build failed")
    assert cause in error.what
    assert output in error.what


@pytest.mark.parametrize("kind", ["train", "notebook"])
def test_the_text_of_a_dockerfile_is_not_taken_for_a_failure(kind: str) -> None:
    """The tools print each step before they run it."""
    step = deploy_path("docker", kind, "Dockerfile").read_text(encoding="utf-8")
    assert explained(step, "buildah", "the build failed").what.startswith("the build failed:")


@pytest.mark.slow
@each_tool
def test_other_registries_use_the_login_of_the_user(tool: FakeTool) -> None:
    built(tool, BuildOptions(gpu=False))
    tool.answer("push", f"1: digest: {DIGEST} size: 528")
    builder = Builder(tool.name, env=tool.env)
    options = PushOptions(to="ghcr.io/us/maskfleet", tag="1")
    [image] = push(options, builder, env=tool.env, say=lambda text: None)
    assert image.reference == f"ghcr.io/us/maskfleet:1@{DIGEST}"
    [call] = tool.calls("push")
    assert call["argv"][-1] == "ghcr.io/us/maskfleet:1"
    assert "login" not in call
    assert ImageJournal(tool.env).pushed() == [image]


def test_what_was_not_built_here_or_is_gone_cannot_be_pushed(tool: FakeTool) -> None:
    builder = Builder(tool.name, env=tool.env)
    with pytest.raises(InfraError, match="no train image was built") as caught:
        push(PushOptions(), builder, env=tool.env, say=lambda text: None)
    assert caught.value.remedy == "maskfleet image build"
    built(tool, BuildOptions(gpu=False))
    tool.answer("inspect", "12" * 32)
    tool.answer("image", f"sha256:{'12' * 32}")
    with pytest.raises(InfraError, match="no longer on this machine"):
        push(PushOptions(), builder, env=tool.env, say=lambda text: None)
    other = Builder("podman" if tool.name != "podman" else "docker", env=tool.env)
    with pytest.raises(InfraError, match="was built with"):
        push(PushOptions(), other, env=tool.env, say=lambda text: None)
