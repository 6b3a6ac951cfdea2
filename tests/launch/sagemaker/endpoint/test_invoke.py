"""Requests to an endpoint: throttling, refusals, limits, asynchronous answers, and answers of other programs."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
from endpoint_world import EndpointWorld, endpoint_spec
from sagemaker_world import Refusal

from maskfleet.errors import DataError, LaunchError
from maskfleet.launch.sagemaker.endpoint.deploy import deploy
from maskfleet.launch.sagemaker.endpoint.invoke import (
    ASYNC_S,
    PROGRAM_BYTES,
    REAL_TIME_BYTES,
    RETRY_S,
    SERVERLESS_BYTES,
    EndpointClient,
)
from maskfleet.launch.sagemaker.services import Services
from maskfleet.rle import encode_window
from maskfleet.serve.app import MAX_BODY_BYTES, Request, RequestError
from maskfleet.serve.client import EVERY_SCORE, parsed_answer
from maskfleet.serve.detection import ATTRIBUTES, query_of

FOUND = {"category_id": 7, "bbox": [1.0, 2.0, 3.0, 4.0], "score": 0.9, "category_name": "disc", "label": 1}


class Sleeper:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


class ProgramRefusal(Refusal):
    """What SageMaker answers when the program in the container refuses a request."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__("ModelError", f"Received client error ({status}) from primary with message {words!r}")
        self.members = {"OriginalStatusCode": status, "OriginalMessage": words}


def endpoint(hosting: EndpointWorld, services: Services, **changes: Any) -> tuple[EndpointClient, Sleeper]:
    hosting.states = deque(["InService"])
    deploy(services, endpoint_spec(**changes), replace=False, say=print)
    clock = Sleeper()
    return EndpointClient(services, "shapes", sleep=clock.sleep, clock=clock), clock


def test_a_client_listens_longer_than_a_model_may_compute(services: Services) -> None:
    """AWS advises 70 s where a model takes up to 60: a client that gives up first sends the image again."""
    assert services.client("sagemaker-runtime").meta.config.read_timeout == 70


def test_a_throttled_request_is_sent_again(hosting: EndpointWorld, services: Services) -> None:
    client, clock = endpoint(hosting, services)
    busy = [Refusal("ThrottlingException"), ProgramRefusal(503, '{"error": "64 requests are waiting", "remedy": "-"}')]
    hosting.invocations.extend([*busy, Refusal("ModelNotReadyException"), b"answer"])
    assert client.send(b"image", "image/jpeg", "score=0") == b"answer"
    assert clock.now == 1 + 2 + 4
    [first, *others] = hosting.sent("InvokeEndpoint")
    assert others == [first] * 3
    assert first["CustomAttributes"] == "score=0"
    hosting.invocations.extend([Refusal("ThrottlingException", "Rate exceeded")] * 100)
    with pytest.raises(LaunchError, match="cannot send an image to endpoint shapes"):
        client.send(b"image", "image/jpeg", "score=0")
    assert RETRY_S <= clock.now < 2 * RETRY_S


@pytest.mark.parametrize(
    ("status", "words", "kind", "what"),
    [
        (
            400,
            '{"error": "image 0 is not a complete image", "remedy": "send a whole JPEG"}',
            DataError,
            "not a complete",
        ),
        (413, "too large", DataError, "refuses the image: too large"),
        (500, '{"error": "the server failed", "remedy": "try another image"}', DataError, "the server failed"),
        (502, "Bad Gateway", LaunchError, r"failed \(502\): Bad Gateway"),
    ],
)
def test_the_words_of_the_program_reach_the_user(
    hosting: EndpointWorld, services: Services, status: int, words: str, kind: type[Exception], what: str
) -> None:
    client, _ = endpoint(hosting, services)
    hosting.invocations.append(ProgramRefusal(status, words))
    with pytest.raises(kind, match=what):
        client.send(b"image", "image/jpeg", "")


def test_an_image_above_the_limit_is_not_sent(hosting: EndpointWorld, services: Services) -> None:
    assert PROGRAM_BYTES == MAX_BODY_BYTES
    client, _ = endpoint(hosting, services)
    body = services.client("sagemaker-runtime").meta.service_model.operation_model("InvokeEndpoint").input_shape
    assert client.max_bytes == REAL_TIME_BYTES == body.members["Body"].metadata["max"]
    with pytest.raises(DataError, match=r"6,291,457 bytes is above the endpoint's limit of 6,291,456") as refused:
        client.send(bytes(REAL_TIME_BYTES + 1), "image/jpeg", "")
    assert "--async" in refused.value.remedy
    assert not hosting.sent("InvokeEndpoint")


def test_a_serverless_endpoint_has_a_lower_limit(hosting: EndpointWorld, services: Services) -> None:
    assert endpoint(hosting, services, serverless_mib=4096)[0].max_bytes == SERVERLESS_BYTES


def test_an_asynchronous_endpoint_answers_in_s3(hosting: EndpointWorld, services: Services) -> None:
    client, clock = endpoint(hosting, services, async_uri="s3://lab/async/shapes")
    assert client.max_bytes == PROGRAM_BYTES
    hosting.answers = {"S3OutputPath": b"answer"}
    assert client.send(b"x" * (REAL_TIME_BYTES + 1), "image/jpeg", "score=0") == b"answer"
    [sent] = hosting.sent("InvokeEndpointAsync")
    assert sent["InputLocation"].startswith("s3://lab/async/shapes/input/")
    assert len(hosting.objects["lab", sent["InputLocation"].removeprefix("s3://lab/")]) == REAL_TIME_BYTES + 1
    del hosting.objects["lab", "async/shapes/output/1.out"]
    hosting.answers = {"S3FailurePath": b'{"error": "image 0 is not a complete image", "remedy": "send all of it"}'}
    with pytest.raises(DataError, match="not a complete image"):
        client.send(b"x", "image/jpeg", "score=0")
    del hosting.objects["lab", "async/shapes/failure/1.out"]
    hosting.answers = {}
    began = clock.now
    with pytest.raises(LaunchError, match="has not answered within 3600 s"):
        client.send(b"x", "image/jpeg", "score=0")
    assert clock.now - began >= ASYNC_S


@pytest.mark.parametrize("operation", ["PutObject", "GetObject"])
def test_an_asynchronous_request_without_permission_in_s3_names_what_is_missing(
    hosting: EndpointWorld, services: Services, operation: str
) -> None:
    """S3 says AccessDenied, not NoSuchKey, of an answer that is not there yet to those who may not list the bucket."""
    client, _ = endpoint(hosting, services, async_uri="s3://lab/async/shapes")
    hosting.failing = {operation: deque([Refusal("AccessDenied", "Access Denied")])}
    with pytest.raises(LaunchError, match="s3://lab/async/shapes") as caught:
        client.send(b"x", "image/jpeg", "score=0")
    for action in ("s3:PutObject", "GetObject", "s3:ListBucket"):
        assert action in caught.value.remedy


def test_an_endpoint_that_does_not_answer_is_an_error_before_images_are_read(
    hosting: EndpointWorld, services: Services
) -> None:
    with pytest.raises(LaunchError, match="there is no endpoint shapes in us-west-2"):
        EndpointClient(services, "shapes")
    deploy(services, endpoint_spec(), replace=False, say=print)
    hosting.states = deque(["Creating"])
    with pytest.raises(LaunchError, match="is Creating and does not answer"):
        EndpointClient(services, "shapes")


@pytest.mark.parametrize(
    "change",
    [
        {"bbox": [1, 2, 3]},
        {"bbox": [float("nan"), 0, 1, 1]},
        {"label": 0},
        {"label": 10**9},
        {"score": "high"},
        {"score": 10**400},
        {"bbox": [0, 0, 10**400, 1]},
        {"category_id": math.inf},
        {"segmentation": {"size": [10**6, 10**6], "counts": "0"}},
        {"segmentation": {"size": [6, 8], "counts": "~~~"}},
        {"segmentation": [[0, 0, 1, 1, 0, 1]]},
    ],
)
def test_an_answer_of_another_program_is_a_clear_error(change: dict[str, Any]) -> None:
    answer = {"height": 6, "width": 8, "detections": [FOUND | change]}
    with pytest.raises(LaunchError, match="not that of a maskfleet model"):
        parsed_answer(json.dumps(answer).encode(), (6, 8))
    for other in (b"", b"[]", b"<html>", b'{"predictions": []}'):
        with pytest.raises(LaunchError, match="not that of a maskfleet model"):
            parsed_answer(other, (6, 8))


def test_the_program_reads_the_score_from_custom_attributes() -> None:
    def score(kind: str, body: bytes, attributes: str, **query: str) -> float:
        headers = {"content-type": kind, ATTRIBUTES: attributes}
        return query_of(Request("POST", "/invocations", query, headers, body), 0.5).score

    image = b'{"image": "AAAA"}'
    assert score("image/jpeg", b"x", EVERY_SCORE) == score("application/json", image, EVERY_SCORE) == 0
    assert score("image/jpeg", b"x", "other=1") == score("application/json", image, "") == 0.5
    assert score("image/jpeg", b"x", EVERY_SCORE, score="0.7") == 0.7
    with pytest.raises(RequestError, match="not a number from 0 to 1"):
        score("image/jpeg", b"x", "score=7")


def test_an_answer_is_read_as_detections() -> None:
    rle = encode_window(2, 1, np.ones((2, 3), np.bool_), 6, 8)
    other = FOUND | {"category_id": 9, "category_name": "ring", "label": 3, "score": 0.2}
    answer = {"height": 6, "width": 8, "detections": [FOUND | {"segmentation": rle}, other]}
    found = parsed_answer(json.dumps(answer).encode(), (6, 8))
    assert found.class_names == ["disc", "ring"]
    assert [name for _, name in found.categories] == ["disc", "", "ring"]
    [sure] = found[found.scores > 0.5].to_coco(4)
    assert sure == {"image_id": 4, "category_id": 7, "bbox": [1.0, 2.0, 3.0, 4.0], "score": 0.9, "segmentation": rle}
    with pytest.raises(LaunchError, match="about an image of 6 x 8"):
        parsed_answer(json.dumps(answer).encode(), (6, 9))
