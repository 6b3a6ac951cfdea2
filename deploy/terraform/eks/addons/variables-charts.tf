# What to install, and the configuration of GPU nodes. Versions are pinned; raise them one at a time.

variable "karpenter_version" {
  description = "Version of Karpenter and of its CRDs."
  type        = string
  default     = "1.13.0"

  validation {
    condition     = can(regex("^1\\.[0-9]+\\.[0-9]+$", var.karpenter_version))
    error_message = "karpenter_version must be a version 1.x.y, without v: the node pools are of its v1 API."
  }
}

variable "karpenter_capacity_type" {
  description = "Capacity type of GPU nodes: on-demand or spot."
  type        = string
  default     = "on-demand"

  validation {
    condition     = contains(["on-demand", "spot"], var.karpenter_capacity_type)
    error_message = "karpenter_capacity_type must be on-demand or spot."
  }
}

variable "karpenter_consolidate_after" {
  description = "How long a GPU node may be empty before it is terminated, or Never."
  type        = string
  default     = "600s"

  validation {
    condition     = can(regex("^(([0-9]+(s|m|h))+|Never)$", var.karpenter_consolidate_after))
    error_message = "karpenter_consolidate_after must be a duration, such as 600s or 1h30m, or Never."
  }
}

variable "gpu_ami_alias" {
  description = "Image of GPU nodes: EKS's AL2023 by release; empty uses the one of the chart gpu-nodes."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(al2023@(v[0-9]{8}|latest))?$", var.gpu_ami_alias))
    error_message = "gpu_ami_alias must be al2023@vYYYYMMDD, al2023@latest, or empty."
  }
}

variable "gpu_limit" {
  description = "Maximum number of GPUs in each pool."
  type        = number
  default     = 1024

  validation {
    condition     = var.gpu_limit >= 0 && var.gpu_limit <= 100000 && floor(var.gpu_limit) == var.gpu_limit
    error_message = "gpu_limit must be a whole number from 0 to 100000."
  }
}

variable "node_volume_size" {
  description = "Root disk of GPU nodes, GiB."
  type        = number
  default     = 200

  validation {
    condition     = var.node_volume_size >= 50 && var.node_volume_size <= 16384 && floor(var.node_volume_size) == var.node_volume_size
    error_message = "node_volume_size must be a whole number from 50 to 16384."
  }
}

variable "gpu_instances" {
  description = "Instance types of the general pool; empty uses those of the chart gpu-nodes (all known ones without EFA)."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for one in var.gpu_instances : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", one))])
    error_message = "gpu_instances must be EC2 instance types, such as g5.xlarge."
  }
}

variable "efa_instances" {
  description = "Instance types of the EFA pool; empty uses those of the chart gpu-nodes (all known ones with EFA)."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for one in var.efa_instances : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", one))])
    error_message = "efa_instances must be EC2 instance types, such as p5.48xlarge."
  }
}

variable "capacity_reservations" {
  description = "On-Demand Capacity Reservations or Capacity Blocks for the EFA pool, by id."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for one in var.capacity_reservations : can(regex("^cr-[0-9a-z]+$", one))])
    error_message = "capacity_reservations must be ids, such as cr-0123456789abcdef0."
  }
}

variable "reserved_only" {
  description = "Whether the EFA pool has reserved capacity only; needs capacity_reservations."
  type        = bool
  default     = false
}

variable "node_tags" {
  description = "Tags of GPU instances and their disks."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key, value in var.node_tags : key != "" && value != "" && !startswith(lower(key), "aws:")])
    error_message = "node_tags must have keys and values that are not empty; keys must not start with aws:."
  }
}

variable "nvidia_plugin_version" {
  description = "Version of NVIDIA's device plugin."
  type        = string
  default     = "0.18.0"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.nvidia_plugin_version))
    error_message = "nvidia_plugin_version must be a version, such as 0.18.0, without v."
  }
}

variable "efa_plugin_version" {
  description = "Version of the EFA device plugin's chart; installed only with efa_az."
  type        = string
  default     = "v0.5.29"

  validation {
    condition     = can(regex("^v[0-9]+\\.[0-9]+\\.[0-9]+$", var.efa_plugin_version))
    error_message = "efa_plugin_version must be a version with v, such as v0.5.29."
  }
}

variable "autoscaler_version" {
  description = "Version of the Cluster Autoscaler's chart."
  type        = string
  default     = "9.58.0"

  validation {
    condition     = can(regex("^9\\.[0-9]+\\.[0-9]+$", var.autoscaler_version))
    error_message = "autoscaler_version must be a version 9.x.y of the chart."
  }
}

variable "load_balancer_controller_version" {
  description = "Version of the load-balancer controller's chart; installed only with load_balancer_role_arn."
  type        = string
  default     = "1.17.1"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.load_balancer_controller_version))
    error_message = "load_balancer_controller_version must be a version, such as 1.17.1."
  }
}

variable "metrics_server_enabled" {
  description = "Whether to install metrics-server (kubectl top)."
  type        = bool
  default     = false
}

variable "metrics_server_version" {
  description = "Version of metrics-server's chart."
  type        = string
  default     = "3.13.0"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.metrics_server_version))
    error_message = "metrics_server_version must be a version, such as 3.13.0."
  }
}

variable "kueue_enabled" {
  description = "Whether to install Kueue, for the train chart's value queue."
  type        = bool
  default     = false
}

variable "kueue_version" {
  description = "Version of Kueue's chart."
  type        = string
  default     = "0.17.2"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.kueue_version))
    error_message = "kueue_version must be a version, such as 0.17.2."
  }
}

variable "kueue_queue" {
  description = "Queue to create in kubeflow_namespace, for launch.queue; empty creates none. Needs kueue_enabled."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$", var.kueue_queue))
    error_message = "kueue_queue must be the name of a Kubernetes object, such as training, or empty."
  }
}

variable "kueue_cluster_queue" {
  description = "ClusterQueue that exists and that kueue_queue belongs to; empty creates one with the limits of the node pools."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)?$", var.kueue_cluster_queue))
    error_message = "kueue_cluster_queue must be the name of a ClusterQueue, or empty."
  }
}

variable "kueue_ready_timeout" {
  description = "Time in which all pods of a run must be ready; after it Kueue frees their nodes and queues the run again."
  type        = string
  default     = "30m"

  validation {
    condition     = can(regex("^([0-9]+(s|m|h))+$", var.kueue_ready_timeout))
    error_message = "kueue_ready_timeout must be a duration, such as 30m."
  }
}

variable "mpi_operator_image" {
  description = "Repository of mpi-operator's image, such as a mirror in ECR; empty uses the one of the chart."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z0-9]+([._:/-]+[a-z0-9]+)*)?$", var.mpi_operator_image))
    error_message = "mpi_operator_image must be a repository without a tag, or empty."
  }
}

variable "mpi_operator_version" {
  description = "Tag of mpi-operator's image; empty uses the chart's."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(v?0\\.([6-9]|[1-9][0-9])\\.[0-9]+)?$", var.mpi_operator_version))
    error_message = "mpi_operator_version must be 0.6 or newer, such as 0.8.2: older ones start the launcher before its workers."
  }
}

variable "mpi_operator_digest" {
  description = "sha256:… of mpi-operator's image, which overrides the tag."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(sha256:[0-9a-f]{64})?$", var.mpi_operator_digest))
    error_message = "mpi_operator_digest must be sha256: and 64 hexadecimal digits, or empty."
  }
}

variable "mpi_operator_all_namespaces" {
  description = "Whether mpi-operator serves all namespaces, with permissions in all; otherwise only kubeflow_namespace."
  type        = bool
  default     = false
}

variable "dcgm_exporter_enabled" {
  description = "Whether NVIDIA's exporter offers utilization, memory, temperature and errors of GPUs to Prometheus."
  type        = bool
  default     = false
}

variable "dcgm_exporter_version" {
  description = "Version of the chart dcgm-exporter."
  type        = string
  default     = "4.8.2"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.dcgm_exporter_version))
    error_message = "dcgm_exporter_version must be a version, such as 4.8.2, without v."
  }
}

variable "prometheus_operator" {
  description = "Whether the cluster has the Prometheus Operator, so that exporters create a ServiceMonitor."
  type        = bool
  default     = false
}
