variable "system_instances" {
  description = "Instance types of the system nodes, which run controllers and the launchers of training jobs."
  type        = list(string)
  default     = ["m7i.xlarge", "m6i.xlarge", "m7a.xlarge", "m6a.xlarge", "m5.xlarge"]

  validation {
    condition     = length(var.system_instances) >= 1 && alltrue([for one in var.system_instances : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", one))])
    error_message = "system_instances must name at least one x86-64 instance type, such as m7i.xlarge."
  }
}

variable "system_capacity_type" {
  description = "ON_DEMAND or SPOT; a job ends if its launcher runs on a SPOT node that is reclaimed."
  type        = string
  default     = "ON_DEMAND"

  validation {
    condition     = contains(["ON_DEMAND", "SPOT"], var.system_capacity_type)
    error_message = "system_capacity_type must be ON_DEMAND or SPOT."
  }
}

variable "system_volume_size" {
  description = "Root disk of a system node in GiB."
  type        = number
  default     = 200

  validation {
    condition     = var.system_volume_size >= 20 && var.system_volume_size <= 16384 && floor(var.system_volume_size) == var.system_volume_size
    error_message = "system_volume_size must be a whole number of GiB from 20 to 16384."
  }
}

variable "system_group_desired" {
  description = "Initial number of system nodes; the Cluster Autoscaler changes it later."
  type        = number
  default     = 2

  validation {
    condition     = var.system_group_desired >= 1 && floor(var.system_group_desired) == var.system_group_desired
    error_message = "system_group_desired must be a whole number, 1 or more."
  }
}

variable "system_group_max" {
  description = "Maximum number of system nodes."
  type        = number
  default     = 8

  validation {
    condition     = var.system_group_max >= 1 && floor(var.system_group_max) == var.system_group_max
    error_message = "system_group_max must be a whole number, 1 or more."
  }
}

variable "system_group_min" {
  description = "Minimum number of system nodes."
  type        = number
  default     = 1

  validation {
    condition     = var.system_group_min >= 1 && floor(var.system_group_min) == var.system_group_min
    error_message = "system_group_min must be a whole number, 1 or more."
  }
}

variable "node_ssm_enabled" {
  description = "Whether Session Manager may open a shell on nodes; there is no SSH."
  type        = bool
  default     = false
}

variable "karpenter_namespace" {
  description = "Namespace of Karpenter, whose service account alone may assume the controller's role."
  type        = string
  default     = "kube-system"

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.karpenter_namespace))
    error_message = "karpenter_namespace must be a Kubernetes namespace."
  }
}

variable "kubeflow_namespace" {
  description = "Namespace of training jobs, staging and notebooks."
  type        = string
  default     = "kubeflow"

  validation {
    condition = (
      can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.kubeflow_namespace)) &&
      !contains(["default", "kube-system", "kube-public", "kube-node-lease"], var.kubeflow_namespace)
    )
    error_message = "kubeflow_namespace must be the name of a namespace that is not one of Kubernetes' own."
  }
}

variable "trainer_service_accounts" {
  description = "Service accounts in kubeflow_namespace that may assume the trainer's role."
  type        = list(string)
  default     = ["maskfleet-trainer"]

  validation {
    condition     = length(var.trainer_service_accounts) >= 1 && alltrue([for one in var.trainer_service_accounts : can(regex("^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", one))])
    error_message = "trainer_service_accounts must name at least one Kubernetes service account, without wildcards."
  }
}

variable "staging_service_accounts" {
  description = "Service accounts in kubeflow_namespace that may assume the staging role."
  type        = list(string)
  default     = ["maskfleet-staging"]

  validation {
    condition     = length(var.staging_service_accounts) >= 1 && alltrue([for one in var.staging_service_accounts : can(regex("^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", one))])
    error_message = "staging_service_accounts must name at least one Kubernetes service account, without wildcards."
  }
}

variable "load_balancer_controller_enabled" {
  description = "Whether to create a role for the AWS Load Balancer Controller; only public notebooks need it."
  type        = bool
  default     = false
}

variable "node_monitoring" {
  description = "Whether EKS's node monitoring agent reports broken GPUs, disks and networks of nodes."
  type        = bool
  default     = true
}
