"""What the user may do and see in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from maskfleet.system.kube.client import ApiError, Kube

T = TypeVar("T")


def if_permitted(ask: Callable[..., T], path: str, **params: str) -> T | None:
    """What `ask`, a method of Kube, returns; None without permission for it."""
    try:
        return ask(path, **params)
    except ApiError as error:
        if error.status == 403:
            return None
        raise


def is_permitted(kube: Kube, verb: str, group: str, kind: str, part: str = "") -> bool:
    """Whether the user may do this in the namespace."""
    asked = {"namespace": kube.namespace, "verb": verb, "group": group, "resource": kind, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
    }
    answer = kube.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer.get("status", {}).get("allowed"))
