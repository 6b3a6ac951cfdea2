output "region" {
  description = "AWS region of the cluster."
  value       = var.region
}

output "cluster_vpc" {
  description = "Id of the VPC."
  value       = local.vpc_id
}

output "cluster_subnets" {
  description = "Ids of the private subnets, in the order of azs."
  value       = [for az in var.azs : local.private_subnets[az]]
}

output "cluster_id" {
  description = "Name of the cluster."
  value       = aws_eks_cluster.this.name
}

output "cluster_version" {
  description = "Kubernetes version of the cluster."
  value       = aws_eks_cluster.this.version
}

output "cluster_endpoint" {
  description = "URL of the Kubernetes API."
  value       = aws_eks_cluster.this.endpoint
}

output "cluster_ca" {
  description = "Certificate authority of the API, base64."
  value       = aws_eks_cluster.this.certificate_authority[0].data
}

output "cluster_oidc_arn" {
  description = "ARN of the OIDC provider for IRSA."
  value       = aws_iam_openid_connect_provider.this.arn
}

output "cluster_security_group" {
  description = "Security group of the control plane, created by EKS."
  value       = local.cluster_security_group
}

output "node_security_group" {
  description = "Security group of all nodes."
  value       = aws_security_group.nodes.id
}

output "node_role_arn" {
  description = "Role of the nodes that Karpenter starts."
  value       = aws_iam_role.service["gpu_node"].arn
}

output "node_role_name" {
  description = "Name of that role, for EC2NodeClass."
  value       = aws_iam_role.service["gpu_node"].name
}

output "system_node_role_arn" {
  description = "Role of the system node group."
  value       = aws_iam_role.service["system_node"].arn
}

output "efs_id" {
  description = "Id of the EFS file system, or empty."
  value       = local.efs_id
}

output "efs_dns" {
  description = "Name of the EFS file system, or empty."
  value       = var.efs_enabled ? "${local.efs_id}.efs.${var.region}.${data.aws_partition.current.dns_suffix}" : ""
}

output "efs_access_point_id" {
  description = "Access point for user 1000; FILESYSTEM::ACCESSPOINT is the volume handle. Empty without EFS."
  value       = var.efs_enabled ? aws_efs_access_point.fleet[0].id : ""
}

output "fsx_id" {
  description = "Id of the FSx file system, or empty."
  value       = var.fsx_enabled ? aws_fsx_lustre_file_system.this[0].id : ""
}

output "fsx_dns" {
  description = "Name of the FSx file system, or empty."
  value       = var.fsx_enabled ? aws_fsx_lustre_file_system.this[0].dns_name : ""
}

output "fsx_mount_name" {
  description = "Mount name of the FSx file system, or empty."
  value       = var.fsx_enabled ? aws_fsx_lustre_file_system.this[0].mount_name : ""
}

output "fsx_subnet_az" {
  description = "Zone of FSx, or empty."
  value       = var.fsx_enabled ? local.fsx_az : ""
}

output "efa_az" {
  description = "Zone for GPU nodes with EFA."
  value       = local.efa_az
}

output "placement_group" {
  description = "Placement group of the GPU nodes with EFA, or null without efa_placement_group_enabled."
  value       = one(aws_placement_group.efa[*].name)
}

output "data_bucket" {
  description = "Bucket of import_path, or empty."
  value       = local.data_bucket
}

output "karpenter_queue" {
  description = "Name of the queue with interruption notices."
  value       = aws_sqs_queue.karpenter.name
}

output "karpenter_namespace" {
  description = "Namespace that the controller's role expects."
  value       = var.karpenter_namespace
}

output "karpenter_role_arn" {
  description = "Role of Karpenter's controller."
  value       = aws_iam_role.workload["karpenter"].arn
}

output "autoscaler_role_arn" {
  description = "Role of the Cluster Autoscaler, service account kube-system/cluster-autoscaler."
  value       = aws_iam_role.workload["autoscaler"].arn
}

output "load_balancer_role_arn" {
  description = "Role of the load-balancer controller, or empty without load_balancer_controller_enabled."
  value       = var.load_balancer_controller_enabled ? aws_iam_role.workload["load_balancer"].arn : ""
}

output "kubeflow_namespace" {
  description = "Namespace of training jobs."
  value       = var.kubeflow_namespace
}

output "trainer_role_arn" {
  description = "Role of training jobs, or empty without import_path."
  value       = var.import_path == "" ? "" : aws_iam_role.workload["trainer"].arn
}

output "trainer_service_accounts" {
  description = "Service accounts that may assume the trainer's role."
  value       = var.trainer_service_accounts
}

output "staging_role_arn" {
  description = "Role of staging jobs, or empty without import_path."
  value       = var.import_path == "" ? "" : aws_iam_role.workload["staging"].arn
}

output "staging_service_accounts" {
  description = "Service accounts that may assume the staging role."
  value       = var.staging_service_accounts
}
