# All nodes use this group, and not the one that EKS creates: every group on an EFA interface must allow traffic to
# itself in both directions, and what EKS puts into its own group has changed over time.
resource "aws_security_group" "nodes" {
  name        = "${var.cluster_name}-nodes"
  description = "Nodes of ${var.cluster_name}"
  vpc_id      = local.vpc_id
  tags = {
    Name                                        = "${var.cluster_name}-nodes"
    "karpenter.sh/discovery"                    = var.cluster_name
    "kubernetes.io/cluster/${var.cluster_name}" = "owned"
  }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "Nodes from nodes, EFA included"
}

# The rule to 0.0.0.0/0 does not cover EFA, whose addresses are not IP addresses.
resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
  description                  = "Nodes to nodes, EFA included"
}

resource "aws_vpc_security_group_egress_rule" "internet" {
  #checkov:skip=CKV_AWS_382:nodes pull images and call AWS, whose addresses change; they have no public address
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  description       = "Nodes to AWS, registries and the control plane"
}

resource "aws_vpc_security_group_ingress_rule" "control_plane" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = local.cluster_security_group
  ip_protocol                  = "-1"
  description                  = "Kubelets and webhooks from the control plane"
}

resource "aws_vpc_security_group_ingress_rule" "api" {
  security_group_id            = local.cluster_security_group
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  description                  = "Kubernetes API from nodes"
}

locals {
  # EKS creates this one and puts it on the control plane's network interfaces.
  cluster_security_group = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
}

resource "aws_launch_template" "system" {
  name_prefix            = "${var.cluster_name}-system-"
  update_default_version = true
  vpc_security_group_ids = [aws_security_group.nodes.id]

  # Hop limit 1 keeps pods from using the node's role.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type           = "gp3"
      volume_size           = var.system_volume_size
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume"]
    content {
      resource_type = tag_specifications.value
      tags          = merge({ "maskfleet/cluster" = var.cluster_name }, var.tags, { Name = "${var.cluster_name}-system" })
    }
  }
}

resource "aws_eks_node_group" "system" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "system"
  node_role_arn   = aws_iam_role.service["system_node"].arn
  subnet_ids      = [for az in var.azs : local.private_subnets[az]]
  version         = var.k8s_version
  ami_type        = "AL2023_x86_64_STANDARD"
  capacity_type   = var.system_capacity_type
  instance_types  = var.system_instances
  labels          = { "maskfleet/node" = "system" }

  launch_template {
    id      = aws_launch_template.system.id
    version = aws_launch_template.system.latest_version
  }

  scaling_config {
    desired_size = var.system_group_desired
    min_size     = var.system_group_min
    max_size     = var.system_group_max
  }

  update_config {
    max_unavailable = 1
  }

  node_repair_config {
    enabled = true
  }

  lifecycle {
    # The Cluster Autoscaler changes it after the first apply.
    ignore_changes = [scaling_config[0].desired_size]

    precondition {
      condition     = var.system_group_min <= var.system_group_desired && var.system_group_desired <= var.system_group_max
      error_message = "system_group_min <= system_group_desired <= system_group_max does not hold."
    }
  }

  depends_on = [
    aws_eks_addon.before_nodes, aws_iam_role_policy_attachment.service, aws_route.nat,
    aws_vpc_security_group_ingress_rule.nodes, aws_vpc_security_group_ingress_rule.control_plane,
    aws_vpc_security_group_ingress_rule.api, aws_vpc_security_group_egress_rule.nodes,
    aws_vpc_security_group_egress_rule.internet,
  ]
}
