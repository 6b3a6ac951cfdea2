output "kubeflow_namespace" {
  description = "Namespace of training jobs."
  value       = local.namespace
}

output "service_accounts" {
  description = "Service accounts for training and staging, and the IAM role of each (empty: none)."
  value       = local.service_accounts
}

output "node_pools" {
  description = "Karpenter's pools."
  value       = flatten([for pools in helm_release.gpu_nodes : concat([pools.name], var.efa_az == "" ? [] : ["${pools.name}-efa"])])
}

output "queue" {
  description = "Queue of Kueue in the namespace, for launch.queue; or empty."
  value       = var.kueue_queue
}

output "volumes" {
  description = "PersistentVolumeClaims in the namespace."
  value       = concat(var.efs_id == "" ? [] : ["pv-efs"], var.fsx_id == "" ? [] : ["pv-fsx"])
}

output "versions" {
  description = "What is installed: chart versions by release."
  value = {
    for release in concat(
      helm_release.karpenter, helm_release.gpu_nodes, helm_release.nvidia_device_plugin,
      helm_release.cluster_autoscaler, helm_release.mpi_operator,
      helm_release.efa_device_plugin, helm_release.load_balancer_controller, helm_release.metrics_server,
      helm_release.kueue, helm_release.queues, helm_release.storage
    ) : release.name => release.version
  }
}
