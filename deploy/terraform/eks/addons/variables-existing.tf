# For a cluster that ../aws did not create: `maskfleet infra up eks --use-cluster NAME` sets these.

variable "existing_parts" {
  description = "What the cluster has already, which is then neither installed nor changed."
  type        = list(string)
  default     = []

  validation {
    condition = length(setsubtract(var.existing_parts, [
      "namespace", "karpenter", "node_pools", "nvidia_device_plugin", "efa_device_plugin", "cluster_autoscaler",
      "mpi_operator", "kueue",
    ])) == 0
    error_message = "existing_parts must be of: namespace, karpenter, node_pools, nvidia_device_plugin, efa_device_plugin, cluster_autoscaler, mpi_operator, kueue."
  }
}

variable "system_node_selector" {
  description = "Labels of the nodes for mpi-operator and the Job that prepares FSx."
  type        = map(string)
  default     = { "maskfleet/node" = "system" }

  validation {
    condition     = alltrue([for key, value in var.system_node_selector : key != "" && can(regex("^[A-Za-z0-9_.-]{0,63}$", value))])
    error_message = "system_node_selector must map names of labels to their values."
  }
}

variable "node_subnet_tags" {
  description = "Tags of the subnets for GPU nodes; empty is karpenter.sh/discovery with the name of the cluster."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key, value in var.node_subnet_tags : key != "" && value != ""])
    error_message = "node_subnet_tags must have keys and values that are not empty."
  }
}

variable "node_security_group_tags" {
  description = "Tags of the security groups of GPU nodes; empty is karpenter.sh/discovery with the name of the cluster."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key, value in var.node_security_group_tags : key != "" && value != ""])
    error_message = "node_security_group_tags must have keys and values that are not empty."
  }
}

variable "gp3_enabled" {
  description = "Whether to create the storage class maskfleet-gp3, encrypted EBS volumes."
  type        = bool
  default     = false
}
