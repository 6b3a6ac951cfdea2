"""What the `train` program makes of the files that SageMaker writes into a container."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from pathlib import Path

import pytest
from opt_ml import hyperparameters, opt_ml
from typer.testing import CliRunner

from maskfleet.cli.main import app
from maskfleet.config.load import DEFAULT_RECIPE, write_run_file
from maskfleet.config.recipes import recipe
from maskfleet.errors import ConfigError, LaunchError
from maskfleet.launch.sagemaker.container.artifacts import copy_artifacts
from maskfleet.launch.sagemaker.container.hyperparameters import run_config
from maskfleet.launch.sagemaker.container.network import await_hosts, network_variables, own_address
from maskfleet.launch.sagemaker.container.output import RelayedLines
from maskfleet.launch.sagemaker.container.train import rank_environments, train
from maskfleet.launch.sagemaker.container.tree import Resources, Tree

TWO = Resources(("algo-1", "algo-2"), "algo-2", "eth0", "p4d.24xlarge")


def test_hyperparameters_of_the_old_notebooks_make_the_run_they_meant(tmp_path: Path) -> None:
    given = {
        "mode_fpn": "True",
        "mode_mask": "True",
        "eval_period": "1",
        "lr_epoch_schedule": "[(16, 0.1), (20, 0.01), (24, None)]",
        "batch_norm": "FreezeBN",
        "batch_size_per_gpu": "4",
        "images_per_epoch": "120000",
        "data_train": "train2017",
        "data_val": "val2017",
        "resnet_arch": '"resnet101"',  # as the SDK encodes text
        "backbone_weights": "ImageNet-R101-AlignPadding.npz",
        "config:TRAIN.GRADIENT_CLIP": "0.36",
        "sagemaker_region": '"us-west-2"',
        "_tuning_objective_metric": "mAP(bbox)/IoU=0.5:0.95",
    }
    config = run_config(given, tmp_path)
    assert config.recipe == "optimized"
    assert config.train.images_per_gpu == 4
    assert config.train.epoch_schedule == ((16, 0.1), (20, 0.01), (24, None))
    assert config.train.gradient_clip == 0.36
    assert config.model.backbone.blocks == (3, 4, 23, 3)
    assert config.model.backbone.weights == "pretrained-models/ImageNet-R101-AlignPadding.npz"
    assert config.data.root == str(tmp_path)
    assert config.log.all_metrics
    tensorpack = run_config({"lr_schedule": "[240000, 320000, 360000]", "resnet_arch": "resnet50"}, tmp_path)
    assert (tensorpack.recipe, tensorpack.train.step_schedule) == ("standard", (240000, 320000, 360000))


def test_hyperparameters_with_new_names(tmp_path: Path) -> None:
    config = run_config({"recipe": "demo", "train.base_lr": "0.02", "data.root": "coco"}, tmp_path)
    assert (config.recipe, config.train.base_lr, config.data.root) == ("demo", 0.02, str(tmp_path / "coco"))
    assert run_config({}, tmp_path).recipe == DEFAULT_RECIPE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train.bace_lr": "0.1"}, "hyper-parameter: there is no field train.bace_lr"),
        ({"train.base_lr": "fast"}, "hyper-parameter: train.base_lr = 'fast'"),
        ({"batch_size_per_gpu": "many"}, "batch_size_per_gpu=many"),
        ({"recipe": "nonsense"}, "nonsense"),
    ],
)
def test_a_bad_hyperparameter_is_named_in_the_failure_reason(tmp_path: Path, given: dict[str, str], said: str) -> None:
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path, settings=given))
    with pytest.raises(ConfigError) as raised:
        train(tree, 1)
    assert said in raised.value.what
    assert tree.failure.read_text() == str(raised.value)


def test_a_job_without_data_or_with_broken_files_says_so(tmp_path: Path) -> None:
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path))
    (tree.root / "input" / "data" / "train").unlink()
    with pytest.raises(LaunchError, match="no channel train: its channels are train"):
        train(tree, 1)
    assert "no channel train" in tree.failure.read_text()
    config = tree.root / "input" / "config"
    (config / "hyperparameters.json").write_text("{")
    with pytest.raises(LaunchError, match="cannot read"):
        tree.hyperparameters()
    (config / "hyperparameters.json").write_text("[]")
    with pytest.raises(LaunchError, match="no JSON object"):
        tree.hyperparameters()
    for content, said in (
        ({"current_host": "algo-9", "hosts": ["algo-1"]}, "algo-9 is not one of algo-1"),
        ({"instance_groups": [{"instance_type": "ml.p4d"}, {"instance_type": "ml.m5"}]}, "ml.m5, ml.p4d"),
    ):
        (config / "resourceconfig.json").write_text(json.dumps(content))
        with pytest.raises(LaunchError, match=said):
            tree.resources()


def test_a_gpu_instance_whose_gpus_torch_does_not_see_is_a_failure_and_not_a_run_on_the_cpu(tmp_path: Path) -> None:
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path, settings={"recipe": "nonsense"}))
    with pytest.raises(ConfigError, match="nonsense"):
        train(tree, 1, gpus=0)  # ml.m5.xlarge has none
    file = tree.root / "input" / "config" / "resourceconfig.json"
    resources = {"current_host": "algo-1", "hosts": ["algo-1"]}
    file.write_text(json.dumps(resources | {"current_instance_type": "ml.g5.12xlarge"}))
    with pytest.raises(LaunchError, match="has 4 GPUs, but torch in this container sees 0 of them"):
        train(tree, 1, gpus=0)
    assert "has 4 GPUs" in tree.failure.read_text()
    with pytest.raises(ConfigError, match="nonsense"):
        train(tree, 4, gpus=4)
    with pytest.raises(ConfigError, match="nonsense"):
        train(tree, 1)  # with --ranks the user has chosen
    file.write_text(json.dumps(resources | {"current_instance_type": "ml.new.large"}))
    with pytest.raises(ConfigError, match="nonsense"):
        train(tree, 1, gpus=0)


def test_the_checkpoints_of_another_run_are_refused_with_what_helps_on_sagemaker(tmp_path: Path) -> None:
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path, settings={"recipe": "demo"}))
    write_run_file(tree.run_dir, recipe("r50_fpn_1x"))
    (tree.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(LaunchError, match="holds another run") as caught:
        train(tree, 1)
    assert "another checkpoint_uri" in caught.value.remedy
    assert "another checkpoint_uri" in tree.failure.read_text()


def test_the_run_directory_is_the_log_channel_or_the_checkpoint_folder(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.run_dir == tmp_path / "checkpoints"
    (tmp_path / "input" / "data" / "log").mkdir(parents=True)
    assert tree.run_dir == tmp_path / "input" / "data" / "log"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "run.yaml").touch()
    assert tree.run_dir == tmp_path / "checkpoints", "the job resumes the run that SageMaker copied from S3"


def test_a_relative_root_is_the_same_folder_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots: list[Path] = []

    def remember(tree: Tree, ranks: int, **more: object) -> int:
        roots.append(tree.root)
        return 0

    monkeypatch.setattr("maskfleet.launch.sagemaker.container.train.train", remember)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["sagemaker", "train", "--root", "ml", "--ranks", "1"])
    assert done.exit_code == 0, done.output
    assert roots == [tmp_path / "ml"]


def test_ranks_of_all_hosts_are_numbered_in_the_order_of_the_hosts(tmp_path: Path) -> None:
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path, ("algo-2", "algo-1"), 0, settings=hyperparameters()))
    resources = tree.resources()
    assert (resources.hosts, resources.index, resources.instance_type) == (("algo-1", "algo-2"), 1, "m5.xlarge")
    ranks = rank_environments(resources, 2, {"A": "1"}, port=5, store=tmp_path)
    assert [one["RANK"] for one in ranks] == ["2", "3"]
    assert {one["WORLD_SIZE"] for one in ranks} == {"4"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["A"]) for one in ranks} == {("algo-1", "5", "1")}
    alone = rank_environments(Resources(("algo-1",), "algo-1"), 2, {}, port=5, store=tmp_path)
    assert {one["MASKFLEET_STORE_FILE"] for one in alone} == {str(tmp_path)}
    assert all("MASTER_ADDR" not in one for one in alone)


def test_variables_of_the_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="maskfleet"):
        over_tcp = network_variables(TWO, {"NCCL_SOCKET_IFNAME": "ens5"}, devices=tmp_path)
    assert over_tcp == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert "p4d.24xlarge has EFA, but this container sees no EFA device" in caplog.text
    (tmp_path / "rdmap16s27").mkdir()
    with caplog.at_level(logging.WARNING, logger="maskfleet"):
        assert "FI_PROVIDER" not in network_variables(TWO, {}, devices=tmp_path, library=tmp_path / "none")
    assert "p4d.24xlarge has EFA, but the image has no EFA software" in caplog.text
    over_efa = network_variables(TWO, {}, devices=tmp_path, library=tmp_path)
    assert over_efa["FI_PROVIDER"] == "efa"
    assert over_efa["NCCL_SOCKET_IFNAME"] == "eth0"
    assert network_variables(Resources(("algo-1",), "algo-1", "eth0"), {}, devices=tmp_path) == {}


def test_the_first_host_listens_on_the_address_of_the_jobs_interface() -> None:
    assert own_address(Resources(("localhost", "other"), "localhost", "lo")) == "127.0.0.1"
    assert own_address(Resources(("127.0.0.2", "127.0.0.3"), "127.0.0.2", "lo")) == "127.0.0.2"
    await_hosts(("localhost", "127.0.0.2"), give_up=lambda: False)
    await_hosts(("no-such-host.invalid",), give_up=lambda: True)
    with pytest.raises(LaunchError, match=r"host no-such-host\.invalid does not resolve"):
        await_hosts(("no-such-host.invalid",), give_up=lambda: False, timeout_s=0)


def test_lines_are_relayed_and_the_words_of_the_first_failing_rank_are_the_reason() -> None:
    target = io.BytesIO()
    lines = RelayedLines(target)
    lines.add(b"2026-01-01T00:00:00 [rank0]: 12:00:00 step: 1  total_cost: 3.5\n")
    lines.add(b"2026-01-01T00:00:00 [rank1]: 12:00:00 something\n")
    assert target.getvalue() == b"12:00:00 step: 1  total_cost: 3.5\n[rank1]: 12:00:00 something\n"
    assert lines.failure(137, "rank 1 on algo-1") == (
        "rank 1 on algo-1 was killed (signal 9), most often because the host ran out of memory"
    )
    assert lines.failure(139, "rank 1") == "rank 1 was ended by signal 11"
    lines.add(b"t [rank0]: error: rank 0 lost another rank while in a step\n")
    lines.add(b"t [rank1]: error: the disk is full\n")
    lines.add("t [rank1]:   → free some space\n".encode())
    assert lines.failure(2, "rank 1 on algo-1") == "rank 1: the disk is full\n  → free some space"


def test_the_end_of_a_long_traceback_is_kept(tmp_path: Path) -> None:
    lines = RelayedLines(io.BytesIO())
    lines.add(b"t [rank3]: Traceback (most recent call last):\n")
    for number in range(100):
        lines.add(f't [rank3]:   File "a.py", line {number}, in frame\n'.encode())
    lines.add("t [rank3]: ValueError: the reason — at the end\n".encode())
    tree = Tree(tmp_path)
    tree.write_failure(lines.failure(1, "rank 3"))
    text = tree.failure.read_text()
    assert text.startswith("rank 3: ")
    assert text.endswith("ValueError: the reason — at the end")
    assert 900 < len(text.encode()) <= 1024


def test_a_long_error_keeps_its_beginning_and_its_remedy(tmp_path: Path) -> None:
    lines = RelayedLines(io.BytesIO())
    lines.add(b"t [rank0]: error: 30 errors in the data\n")
    for number in range(30):
        lines.add(f"t [rank0]:     image {number}: 00000000000000000000000000000{number}.jpg is empty\n".encode())
    lines.add("t [rank0]:   → copy the files again\n".encode())
    text = lines.failure(2, "rank 0")
    assert text.startswith("rank 0: 30 errors in the data\n    image 0")
    assert text.endswith("  → copy the files again")
    assert 1000 < len(text.encode()) <= 1024


class Stubborn:
    """Ranks that do not save in time after a stop request."""

    failed_rank: int | None = None

    def __init__(self, argv: list[str], environments: list[dict[str, str]], **options: object) -> None:
        self.code: int | None = None

    def exit_code(self) -> int | None:
        if self.code is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.code

    def stop(self, grace_s: float) -> None:
        assert grace_s < 120, "SageMaker kills the container then"
        self.code, self.failed_rank = 137, 0

    def clean_up(self) -> None:
        """Nothing is left."""


def test_ranks_that_do_not_save_in_time_are_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskfleet.launch.sagemaker.container.train.RankProcesses", Stubborn)
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path))
    assert train(tree, 1) == 137
    assert tree.failure.read_text() == "rank 0 on algo-1 did not save within 100 s after SIGTERM"


def test_a_failed_copy_does_not_replace_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended(Stubborn):
        def exit_code(self) -> int:
            return code

    monkeypatch.setattr("maskfleet.launch.sagemaker.container.train.RankProcesses", Ended)
    tree = Tree(opt_ml(tmp_path / "ml", tmp_path))
    tree.model.touch()  # a file, so that nothing can be copied into it
    code = 139
    with caplog.at_level(logging.WARNING, logger="maskfleet"):
        assert train(tree, 1) == 139
    assert tree.failure.read_text().endswith("was ended by signal 11")
    assert "the results cannot be copied" in caplog.text
    code = 0
    with pytest.raises(LaunchError, match="training is done, but its results cannot be copied"):
        train(tree, 1)
    assert "training is done" in tree.failure.read_text()


def test_locks_and_temporary_files_are_not_copied(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    for name in (".lock", "run.yaml", "log-rank1.txt", "checkpoints/step-1.json", "checkpoints/.step-2.x"):
        (run_dir / name).write_text(name)
    copy_artifacts(run_dir, tmp_path / "model")
    copy_artifacts(run_dir, tmp_path / "model")  # of a container that was started again
    found = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert found == {"run.yaml", "log-rank1.txt", "checkpoints/step-1.json"}
