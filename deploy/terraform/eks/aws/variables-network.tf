variable "azs" {
  description = "Availability zones for nodes; a public and a private subnet in each."
  type        = list(string)

  validation {
    condition     = length(var.azs) >= 1 && length(distinct(var.azs)) == length(var.azs)
    error_message = "azs must name at least one availability zone, and none twice."
  }

  validation {
    condition     = alltrue([for az in var.azs : can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", az))])
    error_message = "azs must be names of availability zones, such as us-east-1a."
  }
}

variable "existing_vpc_id" {
  description = "VPC to use instead of a new one; it is checked, and not changed. Empty creates one."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(vpc-[0-9a-f]{8,17})?$", var.existing_vpc_id))
    error_message = "existing_vpc_id must be the id of a VPC, vpc-..., or empty."
  }
}

variable "existing_subnet_ids" {
  description = "Private subnets of existing_vpc_id, in the order of azs, each with a route table of its own association."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for id in var.existing_subnet_ids : can(regex("^subnet-[0-9a-f]{8,17}$", id))])
    error_message = "existing_subnet_ids must be ids of subnets, subnet-...."
  }
}

variable "control_plane_az" {
  description = "Second zone for the control plane's network interfaces; needed if azs has one entry, because EKS requires two."
  type        = string
  default     = ""

  validation {
    condition     = var.control_plane_az == "" || can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", var.control_plane_az))
    error_message = "control_plane_az must be the name of an availability zone, or empty."
  }
}

variable "cidr_vpc" {
  description = "IPv4 range of the VPC."
  type        = string
  default     = "192.168.0.0/16"

  validation {
    condition     = can(cidrnetmask(var.cidr_vpc)) && try(tonumber(split("/", var.cidr_vpc)[1]) >= 16 && tonumber(split("/", var.cidr_vpc)[1]) <= 24, false)
    error_message = "cidr_vpc must be an IPv4 range from /16 to /24."
  }
}

variable "cidr_private" {
  description = "Ranges of the private subnets, in the order of azs; for nodes and pods."
  type        = list(string)
  default     = ["192.168.64.0/18", "192.168.128.0/18", "192.168.192.0/18"]

  validation {
    condition     = alltrue([for cidr in var.cidr_private : can(cidrnetmask(cidr))])
    error_message = "cidr_private must be IPv4 ranges."
  }
}

variable "cidr_public" {
  description = "Ranges of the public subnets, in the order of azs; for NAT gateways and load balancers."
  type        = list(string)
  default     = ["192.168.0.0/24", "192.168.1.0/24", "192.168.2.0/24"]

  validation {
    condition     = alltrue([for cidr in var.cidr_public : can(cidrnetmask(cidr))])
    error_message = "cidr_public must be IPv4 ranges."
  }
}

variable "cidr_control_plane" {
  description = "Range of the subnet in control_plane_az."
  type        = string
  default     = "192.168.3.0/28"

  validation {
    condition     = can(cidrnetmask(var.cidr_control_plane))
    error_message = "cidr_control_plane must be an IPv4 range."
  }
}

variable "nat_gateway_per_az" {
  description = "Whether every zone has its own NAT gateway; otherwise one in the first zone serves all."
  type        = bool
  default     = false
}

variable "efa_az" {
  description = "Zone for GPU nodes with EFA, which must be in the same zone; empty is the first of azs."
  type        = string
  default     = ""

  validation {
    condition     = var.efa_az == "" || can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", var.efa_az))
    error_message = "efa_az must be the name of an availability zone, or empty."
  }
}

variable "interface_endpoints" {
  description = "AWS services that nodes reach without NAT, such as ecr.api, ecr.dkr, ec2, sts, eks, eks-auth, logs, sqs, elasticfilesystem, fsx; each is billed."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for one in var.interface_endpoints : can(regex("^[a-z0-9]+([.-][a-z0-9]+)*$", one)) && one != "s3"])
    error_message = "interface_endpoints must be names of AWS services, such as ecr.api; s3 has an endpoint already."
  }
}

variable "efa_placement_group_enabled" {
  description = "Whether to create a cluster placement group for the GPU nodes with EFA: lower latency, and capacity is harder to get."
  type        = bool
  default     = false
}
