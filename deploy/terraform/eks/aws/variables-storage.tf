variable "import_path" {
  description = "s3://bucket/prefix that holds data and receives results: linked to FSx, readable by trainer and staging; empty is none."
  type        = string
  default     = ""

  validation {
    condition     = var.import_path == "" || can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.'()-]+)*/?$", var.import_path))
    error_message = "import_path must be s3://bucket or s3://bucket/prefix, or empty."
  }
}

variable "data_bucket_enabled" {
  description = "Whether to create the bucket of import_path: versioned, encrypted, not public, TLS only."
  type        = bool
  default     = false
}

variable "results_prefix" {
  description = "Folder below import_path where the trainer may write; the log_dir of the charts."
  type        = string
  default     = "logs"

  validation {
    condition     = can(regex("^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", var.results_prefix)) && !strcontains(var.results_prefix, "..")
    error_message = "results_prefix must be a relative folder, such as logs."
  }
}

variable "data_bucket_kms_key_arn" {
  description = "KMS key of the bucket in import_path if it is encrypted with one of yours; empty if not."
  type        = string
  default     = ""

  validation {
    condition     = var.data_bucket_kms_key_arn == "" || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.data_bucket_kms_key_arn))
    error_message = "data_bucket_kms_key_arn must be the ARN of a KMS key, or empty."
  }
}

variable "storage_kms_key_arn" {
  description = "KMS key for EFS and persistent FSx; empty uses the keys that AWS manages. It must outlive the cluster."
  type        = string
  default     = ""

  validation {
    condition     = var.storage_kms_key_arn == "" || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.storage_kms_key_arn))
    error_message = "storage_kms_key_arn must be the ARN of a KMS key, or empty."
  }
}

variable "efs_enabled" {
  description = "Whether to use an EFS file system."
  type        = bool
  default     = true
}

variable "existing_efs_id" {
  description = "EFS file system to use instead of a new one, such as that of an earlier cluster; empty creates one."
  type        = string
  default     = ""

  validation {
    condition     = var.existing_efs_id == "" || can(regex("^fs-[0-9a-f]{8,40}$", var.existing_efs_id))
    error_message = "existing_efs_id must be the id of an EFS file system, fs-..., or empty."
  }
}

variable "efs_performance_mode" {
  description = "generalPurpose or maxIO."
  type        = string
  default     = "generalPurpose"

  validation {
    condition     = contains(["generalPurpose", "maxIO"], var.efs_performance_mode)
    error_message = "efs_performance_mode must be generalPurpose or maxIO."
  }
}

variable "efs_throughput_mode" {
  description = "elastic or bursting."
  type        = string
  default     = "elastic"

  validation {
    condition     = contains(["elastic", "bursting"], var.efs_throughput_mode)
    error_message = "efs_throughput_mode must be elastic or bursting."
  }
}

variable "efs_backup_enabled" {
  description = "Whether AWS Backup keeps daily copies of a new EFS file system."
  type        = bool
  default     = true
}

variable "fsx_enabled" {
  description = "Whether to create an FSx for Lustre file system."
  type        = bool
  default     = true
}

variable "fsx_deployment_type" {
  description = "PERSISTENT_2 or PERSISTENT_1, which replace failed servers, or SCRATCH_2, which loses the data on them."
  type        = string
  default     = "PERSISTENT_2"

  validation {
    condition     = contains(["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"], var.fsx_deployment_type)
    error_message = "fsx_deployment_type must be SCRATCH_2, PERSISTENT_1 or PERSISTENT_2."
  }
}

variable "fsx_storage_capacity" {
  description = "Size of FSx in GiB: 1200 or a multiple of 2400."
  type        = number
  default     = 1200

  validation {
    condition     = var.fsx_storage_capacity == 1200 || (var.fsx_storage_capacity >= 2400 && var.fsx_storage_capacity % 2400 == 0)
    error_message = "fsx_storage_capacity must be 1200 or a multiple of 2400."
  }
}

variable "fsx_throughput" {
  description = "MB/s for each TiB of a persistent FSx; null is the minimum of the type, 125 or 50."
  type        = number
  default     = null

  validation {
    condition     = var.fsx_throughput == null || contains([50, 100, 125, 200, 250, 500, 1000], coalesce(var.fsx_throughput, 0))
    error_message = "fsx_throughput must be 50, 100 or 200 for PERSISTENT_1, 125, 250, 500 or 1000 for PERSISTENT_2, or null."
  }
}

variable "fsx_az" {
  description = "Zone of FSx; reading from another zone costs time and money. Empty is efa_az."
  type        = string
  default     = ""

  validation {
    condition     = var.fsx_az == "" || can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", var.fsx_az))
    error_message = "fsx_az must be the name of an availability zone, or empty."
  }
}
