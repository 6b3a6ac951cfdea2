"""Each chart on a real API: installed, upgraded, rolled back and removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from chart_cases import DOCUMENTED, LIFECYCLES, STORAGE, TRAIN, Lifecycle, Values, filled
from kube import Kube, Manifest, eventually, random_name

pytestmark = pytest.mark.usefixtures("mpijobs", "other_kinds")
Key = tuple[str, str]
IN_USE = "a name that is still in use"


@pytest.mark.parametrize("case", LIFECYCLES, ids=lambda case: case.chart)
def test_a_release_is_installed_upgraded_rolled_back_and_removed(kube: Kube, case: Lifecycle) -> None:
    release = random_name("it")
    with installed(kube, release, case.chart, case.first) as kept:
        first = objects_of(kube, release)

        kube.upgrade(release, case.chart, filled(case.second, kube.namespace))
        second = objects_of(kube, release)
        assert case.changes <= {key[0] for key in first.keys() | second if first.get(key) != second.get(key)}

        kube.helm("rollback", release, "1")
        assert objects_of(kube, release) == first

        kube.helm("uninstall", release)
        eventually(lambda: left(kube, release) <= kept, what=lambda: f"only {kept} left, not {left(kube, release)}")
        assert left(kube, release) == kept
        assert bool(kept) == (case.chart == "storage"), kept


@pytest.mark.parametrize("case", LIFECYCLES, ids=lambda case: case.chart)
def test_a_second_release_of_the_same_name_is_rejected(kube: Kube, case: Lifecycle) -> None:
    release = random_name("it")
    with installed(kube, release, case.chart, case.first):
        objects = objects_of(kube, release)

        done = kube.try_install(release, case.chart, filled(case.second, kube.namespace))

        assert done.returncode != 0
        assert IN_USE in done.stderr
        assert objects_of(kube, release) == objects


def test_another_chart_under_the_name_of_a_run_changes_nothing_of_it(kube: Kube) -> None:
    with installed(kube, "same", "train", TRAIN):
        job = kube.get("mpijob", "same")

        done = kube.try_install("same", "notebook", DOCUMENTED["notebook"]["defaults"])

        assert IN_USE in done.stderr
        assert kube.get("mpijob", "same")["metadata"]["uid"] == job["metadata"]["uid"]


def test_volumes_outlive_their_release_and_are_adopted_by_the_next(kube: Kube) -> None:
    release = random_name("it")
    with installed(kube, release, "storage", STORAGE) as kept:
        claims = {name for kind, name in kept if kind == "PersistentVolumeClaim"}
        assert claims == {"pv-efs", "pv-fsx"}
        for claim in claims:
            eventually(lambda name=claim: phase_of_claim(kube, name) == "Bound", what=f"{claim} bound to its volume")
        kube.helm("uninstall", release)
        volumes = {claim: kube.get("pvc", claim)["metadata"]["uid"] for claim in claims}

        kube.install(release, "storage", STORAGE)

        assert {claim: kube.get("pvc", claim)["metadata"]["uid"] for claim in claims} == volumes


def test_volumes_whose_claims_were_deleted_are_bound_again_by_the_next_release(kube: Kube) -> None:
    # As after `infra down`, which deletes the namespace and with it the claims.
    release = random_name("it")
    with installed(kube, release, "storage", STORAGE):
        eventually(lambda: phase_of_claim(kube, "pv-efs") == "Bound", what="pv-efs bound to its volume")
        kube.helm("uninstall", release)
        kube.kubectl("delete", "pvc", "pv-efs", "pv-fsx")
        volume = f"{kube.namespace}-{release}-efs"
        eventually(lambda: kube.get("pv", volume)["status"]["phase"] == "Released", what=f"{volume} released")

        kube.install(release, "storage", STORAGE)

        for claim in ("pv-efs", "pv-fsx"):
            eventually(lambda name=claim: phase_of_claim(kube, name) == "Bound", what=f"{claim} bound to its volume")


def test_claims_of_one_release_are_not_adopted_by_another(kube: Kube) -> None:
    with installed(kube, random_name("it"), "storage", STORAGE):
        other = random_name("other")

        done = kube.try_install(other, "storage", STORAGE)

        assert done.returncode != 0
        assert "pv-efs" in done.stderr or "pv-fsx" in done.stderr
        assert "cannot be imported into the current release" in done.stderr
        assert kube.cluster_wide(other) == set()


CASES = [(chart, label) for chart, cases in DOCUMENTED.items() for label in cases]


@pytest.mark.parametrize(("chart", "label"), CASES, ids=lambda part: part)
def test_the_api_accepts_documented_values(shared_kube: Kube, chart: str, label: str) -> None:
    values = filled(DOCUMENTED[chart][label], shared_kube.namespace)
    # helm's own dry run asks the API for its kinds only; the second goes through validation and admission.
    objects = shared_kube.install_rehearsed(random_name("it"), chart, values)

    done = shared_kube.rehearse(*objects)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(objects)
    assert "unknown field" not in done.stderr, done.stderr


@contextmanager
def installed(kube: Kube, release: str, chart: str, values: Values) -> Iterator[set[Key]]:
    """A release that is removed afterwards together with what helm keeps; yields the names of the kept objects."""
    kept: set[Key] = set()
    try:
        kube.install(release, chart, filled(values, kube.namespace))
        kept |= keys_kept(kube.released(release))
        yield kept
    finally:
        # An installation that failed has a release, too, and objects outside of the namespace.
        if kube.try_helm("status", release).returncode == 0:
            kept |= keys_kept(kube.released(release))
            kube.helm("uninstall", release)
        # Claims first: a volume in use cannot be deleted.
        for kind, name in sorted(kept, key=lambda key: key[0] != "PersistentVolumeClaim"):
            kube.kubectl("delete", kind, name, "--ignore-not-found", "--timeout=60s")


def keys_kept(objects: list[Manifest]) -> set[Key]:
    return {
        (item["kind"], item["metadata"]["name"])
        for item in objects
        if item["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }


def left(kube: Kube, release: str) -> set[Key]:
    return kube.everything() | kube.cluster_wide(release)


def objects_of(kube: Kube, release: str) -> dict[Key, Manifest]:
    """What was asked of each object of a release, as the API has it."""
    found = {}
    for item in kube.released(release):
        live = kube.get(item["kind"], item["metadata"]["name"])
        asked = {key: value for key, value in live.items() if key not in ("metadata", "status")}
        found[item["kind"], item["metadata"]["name"]] = without_the_control_planes_part(asked)
    assert found, f"{release} has no objects"
    return found


def without_the_control_planes_part(asked: Manifest) -> Manifest:
    match asked["kind"]:
        case "PersistentVolume":
            # The control plane records the claim of a volume at some later time.
            return {**asked, "spec": {key: value for key, value in asked["spec"].items() if key != "claimRef"}}
        case "Job":
            # Selector and label are by the uid of the Job, and a rollback makes a new one.
            spec = {key: value for key, value in asked["spec"].items() if key != "selector"}
            return {**asked, "spec": {**spec, "template": spec["template"]["spec"]}}
        case _:
            return asked


def phase_of_claim(kube: Kube, name: str) -> str:
    return str(kube.get("pvc", name).get("status", {}).get("phase"))
