variable "cluster_id" {
  type = string
}

variable "efs_id" {
  type    = string
  default = ""
}

variable "addon" {
  type    = string
  default = "one"
  validation {
    condition     = length(var.addon) < 10
    error_message = "addon must be short."
  }
}

variable "region" {
  type = string
}

resource "terraform_data" "storage" {
  input = {
    region  = var.region
    cluster = var.cluster_id
    efs     = var.efs_id
    addon   = var.addon
    chart   = file("${path.module}/../../../helm/storage/Chart.yaml")
  }
}

output "storage" {
  value = terraform_data.storage.output.cluster
}
