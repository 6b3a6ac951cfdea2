resource "aws_launch_template" "system" {
  name_prefix            = "${var.cluster_name}-system-"
  update_default_version = true

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
  subnet_ids      = [for az in var.azs : aws_subnet.private[az].id]
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

  depends_on = [aws_eks_addon.before_nodes, aws_iam_role_policy_attachment.service, aws_route.nat]
}
