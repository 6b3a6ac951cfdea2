"""SageMaker in front of moto: jobs that moto only records run for real, each in a tree of its own like /opt/ml.

It answers in moto's place where moto cannot: the checks of policies and quotas are denied, which users see as warnings.
"""

from __future__ import annotations

import http.client
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opt_ml import Host, opt_ml

from maskfleet.data.stage.stage import stage
from maskfleet.launch.sagemaker.logs import GROUP

Json = dict[str, Any]
MOUNT_NAME = "abcdefgh"  # of a Lustre file system
DENIED_XML = b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>"
UNKNOWN_JOB = b'{"__type": "ValidationException", "message": "Requested resource not found."}'  # AWS's words
DENIED_JSON = b'{"__type": "AccessDeniedException", "message": "no"}'


class TrainingService:
    """The state of the service: its jobs, and the folders that stand for file systems, by their ids."""

    def __init__(self, moto: str, clients: Any, folder: Path, file_systems: dict[str, Path]) -> None:
        self.moto, self.clients, self.folder = moto, clients, folder
        self.file_systems = file_systems
        self.hosts: dict[str, Host] = {}
        self.ended: dict[str, str | None] = {}  # by job, the reason of its failure or None

    def start(self, request: Json) -> None:
        threading.Thread(target=self._run, args=(request,), daemon=True).start()

    def described(self, answer: Json) -> Json:
        """What moto answers, in which every job is completed, with the state of the job that runs here."""
        name = answer["TrainingJobName"]
        if name not in self.ended:
            return answer | {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
        if self.ended[name] is None:
            return answer
        return answer | {
            "TrainingJobStatus": "Failed",
            "SecondaryStatus": "Failed",
            "FailureReason": f"AlgorithmError: {self.ended[name]}",
        }

    def available(self, system: Json) -> Json:
        """A Lustre file system with what moto leaves out."""
        [subnet] = self.clients("ec2").describe_subnets(SubnetIds=system["SubnetIds"])["Subnets"]
        mount = {"LustreConfiguration": {"MountName": MOUNT_NAME}}
        return system | mount | {"Lifecycle": "AVAILABLE", "VpcId": subnet["VpcId"]}

    def _run(self, request: Json) -> None:
        name = request["TrainingJobName"]
        channels = {one["ChannelName"]: self._channel(name, one) for one in request["InputDataConfig"]}
        root = self.folder / name / "ml"
        settings = {key: value.replace("/opt/ml/", f"{root}/") for key, value in request["HyperParameters"].items()}
        opt_ml(root, channels["train"], settings=settings)
        if "log" in channels:
            (root / "input" / "data" / "log").symlink_to(channels["log"])
        host = self.hosts[name] = Host(root, "--ranks", "1")
        code = host.code()
        self._log(name, host.printed)
        self._model(request, root / "model")
        self.ended[name] = None if code == 0 else host.failure or f"exit code {code}"

    def _channel(self, job: str, channel: Json) -> Path:
        source = channel["DataSource"]
        if "S3DataSource" in source:  # SageMaker copies the prefix to the instance
            target = self.folder / job / "s3"
            stage(source["S3DataSource"]["S3Uri"], str(target), progress=lambda _: None)
            return target
        system = source["FileSystemDataSource"]
        found = self.file_systems[system["FileSystemId"]] / system["DirectoryPath"].strip("/")
        assert found.is_dir(), f"{system}: SageMaker refuses a job whose directory does not exist"
        return found

    def _log(self, name: str, text: str) -> None:
        logs, stream = self.clients("logs"), f"{name}/algo-1-1794830400"
        now = int(time.time()) * 1000
        rows = [{"timestamp": now, "message": line} for line in text.splitlines() if line.strip()]
        logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
        logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=rows)

    def _model(self, request: Json, folder: Path) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, path.name)
        bucket, _, prefix = request["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://").partition("/")
        key = f"{prefix}/{request['TrainingJobName']}/output/model.tar.gz"
        self.clients("s3").put_object(Bucket=bucket, Key=key, Body=packed.getvalue())


@contextmanager
def served(service: TrainingService) -> Iterator[str]:
    """The address of `service` on loopback, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            operation = (self.headers["X-Amz-Target"] or "").rpartition(".")[2]
            if operation == "ListServiceQuotas" or b"Action=SimulatePrincipalPolicy" in body:
                self._answer(403 if operation == "" else 400, DENIED_JSON if operation else DENIED_XML)
                return
            connection = http.client.HTTPConnection(service.moto.removeprefix("http://"), timeout=240)
            connection.request("POST", self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200 and operation == "CreateTrainingJob":
                service.start(json.loads(body))
            elif answer.status == 200 and operation == "DescribeTrainingJob":
                content = json.dumps(service.described(json.loads(content))).encode()
            elif operation == "DescribeTrainingJob":
                content = UNKNOWN_JOB
            elif operation == "DescribeFileSystems":
                found = [service.available(one) for one in json.loads(content)["FileSystems"]]
                content = json.dumps({"FileSystems": found}).encode()
            self._answer(answer.status, content)

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            for host in service.hosts.values():
                if host.process.poll() is None:
                    host.process.terminate()
                    host.process.wait(240)
