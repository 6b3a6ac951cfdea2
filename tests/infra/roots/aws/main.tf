terraform {
  required_version = ">= 1.5.0"
  backend "s3" {}
}

variable "region" {
  type = string
}

variable "cluster_name" {
  type = string
}

variable "azs" {
  type    = list(string)
  default = ["a", "b"]
}

variable "sleep_s" {
  type    = number
  default = 0
}

variable "needs_file" {
  type    = string
  default = "/"
}

variable "api" {
  type    = string
  default = "https://127.0.0.1:9"
}

variable "api_ca" {
  type    = string
  default = "Y2E="
}

variable "password" {
  type      = string
  sensitive = true
  default   = "unset"
}

resource "terraform_data" "vpc" {
  input = var.cluster_name
}

resource "terraform_data" "subnet" {
  for_each = toset(var.azs)
  input    = "${terraform_data.vpc.output}-${each.key}"
}

resource "terraform_data" "nat" {
  input = terraform_data.subnet["a"].output
}

resource "terraform_data" "efs" {
  input = var.cluster_name
}

resource "terraform_data" "fsx" {
  input = terraform_data.subnet["a"].output
}

resource "terraform_data" "efs_policy" {
  input = terraform_data.efs.output
}

resource "terraform_data" "fsx_policy" {
  input = [terraform_data.fsx.output, terraform_data.cluster.output]
}

resource "terraform_data" "cluster" {
  input = [for subnet in terraform_data.subnet : subnet.output]

  provisioner "local-exec" {
    command = "sleep ${var.sleep_s}"
  }
}

resource "terraform_data" "nodes" {
  input = terraform_data.cluster.output

  provisioner "local-exec" {
    command = "test -e ${var.needs_file}"
  }
}

output "region" {
  value = var.region
}

output "cluster_id" {
  value = terraform_data.nodes.output == null ? "" : var.cluster_name
}

output "cluster_endpoint" {
  value = var.api
}

output "cluster_ca" {
  value = var.api_ca
}

output "efs_id" {
  value = terraform_data.efs.id
}

output "admin_password" {
  value     = var.password
  sensitive = true
}
