"""The Kubernetes API of the cluster, through kubectl: what lives there and Terraform does not know."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from maskfleet.errors import InfraError, MaskfleetError
from maskfleet.system.process import Finished, capture

Capture = Callable[..., Finished]
REQUEST_S = 30


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster reached by the kubeconfig of its own work folder, never by whatever context is current."""

    kubeconfig: Path
    env: Mapping[str, str]
    run: Capture = capture

    def is_ready(self) -> tuple[bool, str]:
        """(whether the API answers, its version or why not)."""
        try:
            answer = self._kubectl(["get", "--raw", "/version"])
        except MaskfleetError as error:
            return False, error.what
        if answer.code != 0:
            return False, _reason(answer)
        return True, str(json.loads(answer.out).get("gitVersion", ""))

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """All objects of a collection such as `/api/v1/services`; none where the cluster knows no such kind."""
        address = f"{path}?{urlencode(query)}" if query else path
        answer = self._kubectl(["get", "--raw", address])
        if answer.code != 0 and _is_missing(answer):
            return []
        found: list[dict[str, Any]] = json.loads(self._checked(answer).out).get("items") or []
        return found

    def delete(self, path: str) -> None:
        """Have one object deleted, which may take a while after this; one that is gone already is fine."""
        answer = self._kubectl(["delete", "--raw", path])
        if answer.code != 0 and not _is_missing(answer):
            self._checked(answer)

    def _kubectl(self, arguments: list[str]) -> Finished:
        argv = ["kubectl", "--kubeconfig", str(self.kubeconfig), f"--request-timeout={REQUEST_S}s", *arguments]
        return self.run(argv, env=self.env, timeout_s=REQUEST_S + 30)

    def _checked(self, answer: Finished) -> Finished:
        if answer.code == 0:
            return answer
        raise InfraError(
            f"the cluster does not do what it was asked: {_reason(answer)}",
            remedy="check network, VPN and that your AWS identity has an access entry in the cluster",
        )


def _is_missing(answer: Finished) -> bool:
    return "NotFound" in answer.err or "could not find the requested resource" in answer.err


def _reason(answer: Finished) -> str:
    lines = [line for line in answer.err.strip().splitlines() if line]
    return lines[-1] if lines else f"kubectl ended with {answer.code}"
