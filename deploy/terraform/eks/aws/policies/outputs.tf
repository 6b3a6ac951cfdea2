output "service_trust" {
  description = "Trust policies of the roles that AWS services assume, by role."
  value       = local.service_trust
}

output "workload_trust" {
  description = "Trust policies of the roles that service accounts assume, by role."
  value       = local.workload_trust
}

output "permissions" {
  description = "Inline policies by role and policy."
  value = {
    for name, statements in {
      "karpenter/nodes"    = local.karpenter_nodes
      "karpenter/reads"    = local.karpenter_reads
      "karpenter/profiles" = local.karpenter_profiles
      "autoscaler/scale"   = local.autoscaler
      "load_balancer/make" = local.load_balancer
      "efs_csi/see"        = local.efs_csi
      "fsx_csi/see"        = local.fsx_csi
      "trainer/data"       = concat(local.read_data, local.write_results)
      "staging/data"       = local.read_data
    } : name => jsonencode({ Version = "2012-10-17", Statement = statements })
  }
}

output "flow_logs" {
  description = "Inline policy of the flow-log role."
  value       = jsonencode({ Version = "2012-10-17", Statement = local.flow_logs })
}

output "cluster_key" {
  description = "Policy of the cluster's KMS key."
  value       = jsonencode(local.cluster_key)
}

output "interruption_queue" {
  description = "Policy of the interruption queue."
  value       = jsonencode(local.interruption_queue)
}

output "data_bucket" {
  description = "Policy of the data bucket."
  value       = jsonencode(local.data_bucket)
}

output "efs_clients" {
  description = "Policy of the EFS file system."
  value       = jsonencode(local.efs_clients)
}
