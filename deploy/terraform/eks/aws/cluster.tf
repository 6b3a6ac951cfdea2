resource "aws_kms_key" "cluster" {
  description             = "Secrets and logs of the EKS cluster ${var.cluster_name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = module.policies.cluster_key
}

resource "aws_kms_alias" "cluster" {
  name          = "alias/${var.cluster_name}-eks"
  target_key_id = aws_kms_key.cluster.key_id
}

# Created before the cluster: EKS would create it without retention and key.
resource "aws_cloudwatch_log_group" "control_plane" {
  name              = "/aws/eks/${var.cluster_name}/cluster"
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.cluster.arn
}

resource "aws_eks_cluster" "this" {
  #checkov:skip=CKV_AWS_39:the public endpoint is off unless public_access_cidrs names who may use it, and 0.0.0.0/0 is refused there
  name                          = var.cluster_name
  version                       = var.k8s_version
  role_arn                      = aws_iam_role.service["control_plane"].arn
  bootstrap_self_managed_addons = false
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]

  # After the standard support of a version AWS upgrades the cluster, instead of billing extended support.
  upgrade_policy {
    support_type = "STANDARD"
  }

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }

  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = aws_kms_key.cluster.arn
    }
  }

  vpc_config {
    subnet_ids = concat(
      [for az in var.azs : local.private_subnets[az]], [for subnet in aws_subnet.control_plane : subnet.id]
    )
    endpoint_private_access = true
    endpoint_public_access  = length(var.public_access_cidrs) > 0
    public_access_cidrs     = length(var.public_access_cidrs) > 0 ? var.public_access_cidrs : null
  }

  depends_on = [aws_cloudwatch_log_group.control_plane, aws_iam_role_policy_attachment.service]
}

resource "aws_eks_access_entry" "admin" {
  for_each = toset(var.eks_admin_role_arns)

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value
  type          = "STANDARD"
}

resource "aws_eks_access_policy_association" "admin" {
  for_each = toset(var.eks_admin_role_arns)

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_eks_access_entry.admin[each.value].principal_arn
  policy_arn    = "arn:${data.aws_partition.current.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"

  access_scope {
    type = "cluster"
  }
}

# EKS creates the access entry of managed node groups, but not that of nodes that Karpenter starts.
resource "aws_eks_access_entry" "gpu_node" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_iam_role.service["gpu_node"].arn
  type          = "EC2_LINUX"
}

resource "aws_iam_openid_connect_provider" "this" {
  url            = aws_eks_cluster.this.identity[0].oidc[0].issuer
  client_id_list = ["sts.amazonaws.com"]
}

locals {
  # Nodes do not become ready without a network, so these come first.
  addons_before_nodes = {
    vpc-cni = {
      role          = "vpc_cni"
      configuration = jsonencode({ enableNetworkPolicy = "true" })
    }
    kube-proxy             = { role = null, configuration = null }
    eks-pod-identity-agent = { role = null, configuration = null }
  }
  addons_after_nodes = merge(
    { coredns = null, aws-ebs-csi-driver = "ebs_csi" },
    # It reports broken GPUs as conditions of their nodes, which Karpenter then replaces.
    { for name in ["eks-node-monitoring-agent"] : name => null if var.node_monitoring },
    { for name in ["aws-efs-csi-driver"] : name => "efs_csi" if var.efs_enabled },
    { for name in ["aws-fsx-csi-driver"] : name => "fsx_csi" if var.fsx_enabled },
  )
}

resource "aws_eks_addon" "before_nodes" {
  for_each = local.addons_before_nodes

  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = lookup(var.addon_versions, each.key, null)
  configuration_values        = each.value.configuration
  service_account_role_arn    = each.value.role == null ? null : aws_iam_role.workload[each.value.role].arn
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  depends_on = [aws_iam_role_policy_attachment.workload]
}

resource "aws_eks_addon" "after_nodes" {
  for_each = local.addons_after_nodes

  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = lookup(var.addon_versions, each.key, null)
  service_account_role_arn    = each.value == null ? null : aws_iam_role.workload[each.value].arn
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  depends_on = [aws_eks_node_group.system, aws_iam_role_policy.workload, aws_iam_role_policy_attachment.workload]
}
