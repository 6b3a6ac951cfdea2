"""The account's quota of an instance type."""

from __future__ import annotations

from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.sagemaker.checks.network import PLACE, lacking, unless_denied
from maskfleet.launch.sagemaker.services import Services


def quota_finding(services: Services, instance: str, use: str, count: int, *, option: str) -> Finding:
    """Whether the quota of `instance` for `use`, such as "endpoint usage", allows `count` by themselves.

    What is already running counts, too, but is not subtracted. `option` is what sets `count`.
    """
    wanted = f"ml.{instance.removeprefix('ml.')} for {use}"
    name = "quota"

    def check() -> Finding:
        client = services.client("service-quotas")
        for page in client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"):
            for one in page["Quotas"]:
                if one["QuotaName"] != wanted:
                    continue
                found = f"{one['Value']:g} of {wanted}, {count} wanted"
                if one["Value"] >= count:
                    return Finding(PLACE, name, Verdict.OK, found)
                remedy = (
                    f"ask for more in the Service Quotas console (quota {one['QuotaCode']}), or take fewer {option}"
                )
                what = f"the account's quota is {one['Value']:g} of {wanted}, and {count} are needed"
                return lacking(name, found, what, remedy)
        remedy = f"SageMaker may not offer the type in {services.region}: see its quotas in the Service Quotas console"
        return Finding(PLACE, name, Verdict.WARN, f"there is no quota {wanted}", remedy)

    return unless_denied(name, "servicequotas:ListServiceQuotas", check)
