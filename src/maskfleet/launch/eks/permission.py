"""What the user may do and see in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from maskfleet.system.kube.client import ApiError, Json, Kube

T = TypeVar("T")


def if_permitted(ask: Callable[..., T], path: str, **params: str) -> T | None:
    """What `ask`, a method of Kube, returns; None without permission for it."""
    try:
        return ask(path, **params)
    except ApiError as error:
        if error.status == 403:
            return None
        raise


def visible_items(kube: Kube, path: str, **params: str) -> list[Json] | None:
    """All objects of a list; None without permission to list them, empty if the kind does not exist."""
    try:
        return if_permitted(kube.items, path, **params)
    except ApiError as error:
        if error.status == 404:
            return []
        raise


def refused_permissions(kube: Kube, wanted: Mapping[tuple[str, str, str], tuple[str, ...]]) -> list[str]:
    """What the user may not do in the namespace, as `create pods`, of the verbs `wanted` by group, resource, part."""
    return [
        f"{verb} {kind}{f'/{part}' if part else ''}"
        for (group, kind, part), verbs in wanted.items()
        for verb in verbs
        if not _is_permitted(kube, verb, group, kind, part)
    ]


def _is_permitted(kube: Kube, verb: str, group: str, kind: str, part: str) -> bool:
    asked = {"namespace": kube.namespace, "verb": verb, "group": group, "resource": kind, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in asked.items() if value}},
    }
    answer = kube.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer.get("status", {}).get("allowed"))
