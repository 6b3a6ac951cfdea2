# Detects a stale endpoint or a profile of another account before anything is installed.
data "aws_eks_cluster" "this" {
  name = var.cluster_id

  lifecycle {
    postcondition {
      condition     = self.endpoint == var.cluster_endpoint && self.status == "ACTIVE"
      error_message = "cluster_endpoint: the cluster ${var.cluster_id} in ${var.region} has another one or is not ACTIVE; read the outputs of ../aws again."
    }
  }
}

resource "kubernetes_namespace_v1" "kubeflow" {
  count = contains(var.existing_parts, "namespace") ? 0 : 1

  metadata {
    name = var.kubeflow_namespace
    labels = {
      "app.kubernetes.io/managed-by"               = "Terraform"
      "app.kubernetes.io/part-of"                  = "maskfleet"
      "pod-security.kubernetes.io/enforce"         = "restricted"
      "pod-security.kubernetes.io/enforce-version" = "latest"
      "pod-security.kubernetes.io/warn"            = "restricted"
      "pod-security.kubernetes.io/audit"           = "restricted"
    }
  }

  depends_on = [data.aws_eks_cluster.this]
}

locals {
  namespace = one(concat(kubernetes_namespace_v1.kubeflow[*].metadata[0].name, contains(var.existing_parts, "namespace") ? [var.kubeflow_namespace] : []))

  service_accounts = merge(
    { for name in var.trainer_service_accounts : name => var.trainer_role_arn },
    { for name in var.staging_service_accounts : name => var.staging_role_arn }
  )
}

resource "kubernetes_service_account_v1" "data" {
  for_each = local.service_accounts

  metadata {
    name        = each.key
    namespace   = local.namespace
    labels      = { "app.kubernetes.io/part-of" = "maskfleet" }
    annotations = each.value == "" ? {} : { "eks.amazonaws.com/role-arn" = each.value }
  }

  # AWS's webhook mounts its own token; jobs do not need the Kubernetes API.
  automount_service_account_token = false

  lifecycle {
    precondition {
      condition     = length(setintersection(var.trainer_service_accounts, var.staging_service_accounts)) == 0
      error_message = "trainer_service_accounts and staging_service_accounts share a name; one account has one role."
    }
  }
}
