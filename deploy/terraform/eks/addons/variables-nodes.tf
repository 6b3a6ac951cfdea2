variable "node_volume_iops" {
  description = "IOPS of the root disk of GPU nodes."
  type        = number
  default     = 10000

  validation {
    condition     = var.node_volume_iops >= 3000 && var.node_volume_iops <= 16000 && floor(var.node_volume_iops) == var.node_volume_iops
    error_message = "node_volume_iops must be a whole number from 3000 to 16000."
  }
}

variable "node_volume_throughput" {
  description = "Throughput of the root disk of GPU nodes, MiB/s."
  type        = number
  default     = 500

  validation {
    condition     = var.node_volume_throughput >= 125 && var.node_volume_throughput <= 1000 && floor(var.node_volume_throughput) == var.node_volume_throughput
    error_message = "node_volume_throughput must be a whole number from 125 to 1000."
  }
}

variable "node_instance_store" {
  description = "RAID0 puts images and scratch data on the NVMe disks of types that have them; empty uses the root disk."
  type        = string
  default     = ""

  validation {
    condition     = contains(["", "RAID0"], var.node_instance_store)
    error_message = "node_instance_store must be RAID0 or empty."
  }
}

variable "node_expire_after" {
  description = "Age at which a GPU node is replaced, which ends the run on it; or Never."
  type        = string
  default     = "Never"

  validation {
    condition     = can(regex("^(([0-9]+(s|m|h))+|Never)$", var.node_expire_after))
    error_message = "node_expire_after must be a duration, such as 720h, or Never."
  }
}

variable "node_max_pods" {
  description = "Maximum number of pods on a GPU node; the kubelet reserves 11 MiB for each."
  type        = number
  default     = 29

  validation {
    condition     = var.node_max_pods >= 15 && var.node_max_pods <= 250 && floor(var.node_max_pods) == var.node_max_pods
    error_message = "node_max_pods must be a whole number from 15 to 250."
  }
}

variable "placement_group" {
  description = "Existing placement group, strategy cluster, for the nodes with EFA; empty is none."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^[A-Za-z0-9 ._:/()#,@\\[\\]+=&;{}!$*-]{0,255}$", var.placement_group))
    error_message = "placement_group must be the name of a placement group, or empty."
  }
}

variable "node_repair" {
  description = "Whether Karpenter replaces nodes that are reported broken; training pods on them are stopped without notice."
  type        = bool
  default     = true
}
