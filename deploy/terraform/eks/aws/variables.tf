# Conditions on more than one variable are preconditions of the resource they concern: before Terraform 1.9 a validation
# can refer to its own variable only.

variable "region" {
  description = "AWS region of all resources."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must be the code of an AWS region, such as us-east-1."
  }
}

variable "profile" {
  description = "Profile of the AWS configuration to use; empty uses the credentials of the environment."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^[A-Za-z0-9_.@+=,-]*$", var.profile))
    error_message = "profile must be the name of a profile in the AWS configuration, or empty."
  }
}

variable "cluster_name" {
  description = "Name of the cluster; also part of the names of roles, file systems, queue and log groups."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,36}[a-z0-9]$", var.cluster_name))
    error_message = "cluster_name must have 3 to 38 lower-case letters, digits and hyphens, a letter first and no hyphen last."
  }
}

variable "k8s_version" {
  description = "Kubernetes version of control plane and system nodes."
  type        = string
  default     = "1.35"

  validation {
    condition     = can(regex("^1\\.(3[0-9]|[4-9][0-9])$", var.k8s_version))
    error_message = "k8s_version must be a minor version from 1.30 on, such as 1.35, without a patch number."
  }
}

variable "tags" {
  description = "Tags of every resource, besides maskfleet/cluster."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : key != "" && !startswith(lower(key), "aws:")])
    error_message = "tags must have keys that are not empty and do not start with aws:."
  }
}

variable "public_access_cidrs" {
  description = "IPv4 ranges from which the Kubernetes API may be reached over the internet; empty makes it reachable inside the VPC only."
  type        = list(string)
  default     = []

  # With ranges larger than /8 a few entries would cover 0.0.0.0/0.
  validation {
    condition = alltrue([
      for cidr in var.public_access_cidrs : can(cidrnetmask(cidr)) && try(tonumber(split("/", cidr)[1]) >= 8, false)
    ])
    error_message = "public_access_cidrs must be IPv4 ranges of /8 or smaller; 0.0.0.0/0 is refused."
  }
}

variable "eks_admin_role_arns" {
  description = "IAM roles or users that become cluster administrators, besides the one that creates the cluster."
  type        = list(string)
  default     = []

  validation {
    condition = alltrue([
      for arn in var.eks_admin_role_arns : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(role|user)/.+$", arn))
    ])
    error_message = "eks_admin_role_arns must be ARNs of IAM roles or users."
  }

  validation {
    condition     = length(distinct(var.eks_admin_role_arns)) == length(var.eks_admin_role_arns)
    error_message = "eks_admin_role_arns names a principal twice."
  }
}

variable "log_retention_days" {
  description = "Days that control-plane, flow and file-system logs are kept."
  type        = number
  default     = 365

  validation {
    condition = contains(
      [1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653],
      var.log_retention_days
    )
    error_message = "log_retention_days must be one of the retentions that CloudWatch Logs supports, such as 30, 90 or 365."
  }
}

variable "addon_versions" {
  description = "Versions of EKS add-ons by add-on name; an add-on that is not named gets EKS's default for the cluster."
  type        = map(string)
  default     = {}

  validation {
    condition = alltrue([
      for name, version in var.addon_versions : can(regex("^v[0-9]+\\.[0-9]+\\.[0-9]+-eksbuild\\.[0-9]+$", version)) && contains([
        "vpc-cni", "kube-proxy", "coredns", "eks-pod-identity-agent",
        "aws-ebs-csi-driver", "aws-efs-csi-driver", "aws-fsx-csi-driver", "eks-node-monitoring-agent",
      ], name)
    ])
    error_message = "addon_versions must map an add-on of this cluster to a version such as v1.20.1-eksbuild.1."
  }
}
