# Outputs of ../aws with the same names; empty if ../aws did not create the resource.

variable "region" {
  description = "AWS region of the cluster."
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

variable "cluster_id" {
  description = "Name of the cluster."
  type        = string

  validation {
    condition     = can(regex("^[0-9A-Za-z][0-9A-Za-z_-]{0,99}$", var.cluster_id))
    error_message = "cluster_id must be the name of an EKS cluster."
  }
}

variable "cluster_version" {
  description = "Kubernetes version of the cluster; the Cluster Autoscaler has the same one."
  type        = string

  validation {
    condition     = can(regex("^1\\.[0-9]{2}$", var.cluster_version))
    error_message = "cluster_version must be a minor version, such as 1.35."
  }
}

variable "cluster_endpoint" {
  description = "URL of the Kubernetes API."
  type        = string

  validation {
    condition     = can(regex("^https://[A-Za-z0-9.-]+(:[0-9]+)?/?$", var.cluster_endpoint))
    error_message = "cluster_endpoint must be an https URL."
  }
}

variable "cluster_ca" {
  description = "Certificate authority of the API, base64."
  type        = string

  validation {
    condition     = can(regex("^-----BEGIN CERTIFICATE-----", base64decode(var.cluster_ca)))
    error_message = "cluster_ca must be a PEM certificate in base64."
  }
}

variable "cluster_vpc" {
  description = "Id of the VPC, for the load-balancer controller."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(vpc-[0-9a-f]+)?$", var.cluster_vpc))
    error_message = "cluster_vpc must be the id of a VPC, or empty."
  }
}

variable "node_role_name" {
  description = "Name of the role of the nodes that Karpenter starts."
  type        = string

  validation {
    condition     = can(regex("^[\\w+=,.@-]{0,64}$", var.node_role_name))
    error_message = "node_role_name must be the name of an IAM role, not its ARN, or empty without node pools."
  }
}

variable "karpenter_namespace" {
  description = "Namespace that the role of Karpenter's controller expects."
  type        = string
  default     = "kube-system"

  validation {
    condition     = can(regex("^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", var.karpenter_namespace))
    error_message = "karpenter_namespace must be the name of a namespace."
  }
}

variable "karpenter_role_arn" {
  description = "Role of Karpenter's controller."
  type        = string

  validation {
    condition     = can(regex("^(arn:aws[a-z-]*:iam::[0-9]{12}:role/.+)?$", var.karpenter_role_arn))
    error_message = "karpenter_role_arn must be the ARN of an IAM role, or empty if the cluster has its own."
  }
}

variable "karpenter_queue" {
  description = "Name of the queue with interruption notices."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9_-]{0,80}$", var.karpenter_queue))
    error_message = "karpenter_queue must be the name of an SQS queue, not its URL, or empty if the cluster has Karpenter."
  }
}

variable "autoscaler_role_arn" {
  description = "Role of the Cluster Autoscaler, which grows the system node group."
  type        = string

  validation {
    condition     = can(regex("^(arn:aws[a-z-]*:iam::[0-9]{12}:role/.+)?$", var.autoscaler_role_arn))
    error_message = "autoscaler_role_arn must be the ARN of an IAM role, or empty if the cluster has its own."
  }
}

variable "load_balancer_role_arn" {
  description = "Role of the load-balancer controller, which is installed only if this is set."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(arn:aws[a-z-]*:iam::[0-9]{12}:role/.+)?$", var.load_balancer_role_arn))
    error_message = "load_balancer_role_arn must be the ARN of an IAM role, or empty."
  }
}

variable "kubeflow_namespace" {
  description = "Namespace of training jobs; created here, with Pod Security restricted."
  type        = string
  default     = "kubeflow"

  validation {
    condition = (
      can(regex("^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", var.kubeflow_namespace)) &&
      !contains(["default", "kube-system", "kube-public", "kube-node-lease"], var.kubeflow_namespace)
    )
    error_message = "kubeflow_namespace must be the name of a namespace that is not one of Kubernetes' own."
  }
}

variable "trainer_role_arn" {
  description = "Role of training jobs, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(arn:aws[a-z-]*:iam::[0-9]{12}:role/.+)?$", var.trainer_role_arn))
    error_message = "trainer_role_arn must be the ARN of an IAM role, or empty."
  }
}

variable "trainer_service_accounts" {
  description = "Service accounts to create for training jobs; the role trusts these names only."
  type        = list(string)
  default     = ["maskfleet-trainer"]

  validation {
    condition     = alltrue([for one in var.trainer_service_accounts : can(regex("^[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?$", one))])
    error_message = "trainer_service_accounts must be names of Kubernetes service accounts."
  }
}

variable "staging_role_arn" {
  description = "Role of staging jobs, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(arn:aws[a-z-]*:iam::[0-9]{12}:role/.+)?$", var.staging_role_arn))
    error_message = "staging_role_arn must be the ARN of an IAM role, or empty."
  }
}

variable "staging_service_accounts" {
  description = "Service accounts to create for staging jobs; the role trusts these names only."
  type        = list(string)
  default     = ["maskfleet-staging"]

  validation {
    condition     = alltrue([for one in var.staging_service_accounts : can(regex("^[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?$", one))])
    error_message = "staging_service_accounts must be names of Kubernetes service accounts."
  }
}

variable "efs_id" {
  description = "Id of the EFS file system behind pv-efs, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(fs-[0-9a-f]{8,40})?$", var.efs_id))
    error_message = "efs_id must be the id of a file system, such as fs-0123456789abcdef0, or empty."
  }
}

variable "efs_access_point_id" {
  description = "Access point of that file system whose owner is user 1000, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(fsap-[0-9a-f]{8,40})?$", var.efs_access_point_id))
    error_message = "efs_access_point_id must be the id of an access point, such as fsap-0123456789abcdef0, or empty."
  }
}

variable "fsx_id" {
  description = "Id of the FSx for Lustre file system behind pv-fsx, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^(fs-[0-9a-f]{8,40})?$", var.fsx_id))
    error_message = "fsx_id must be the id of a file system, such as fs-0123456789abcdef0, or empty."
  }
}

variable "fsx_dns" {
  description = "Name of the FSx file system, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([A-Za-z0-9-]+(\\.[A-Za-z0-9-]+)+)?$", var.fsx_dns))
    error_message = "fsx_dns must be a host name, or empty."
  }
}

variable "fsx_mount_name" {
  description = "Mount name of the FSx file system, or empty."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^[A-Za-z0-9_-]{0,8}$", var.fsx_mount_name))
    error_message = "fsx_mount_name has at most 8 letters and digits."
  }
}

variable "efa_az" {
  description = "Zone of the GPU nodes with EFA; empty creates no pool for them."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z]{2}(-[a-z]+)+-[0-9][a-z])?$", var.efa_az))
    error_message = "efa_az must be an availability zone, such as us-east-1a, or empty."
  }
}
