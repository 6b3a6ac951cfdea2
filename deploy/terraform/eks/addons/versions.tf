terraform {
  required_version = ">= 1.5.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100.0, < 7.0.0"
    }
    helm = {
      source  = "hashicorp/helm"
      version = "~> 3.1"
    }
    kubernetes = {
      source  = "hashicorp/kubernetes"
      version = "~> 2.38"
    }
  }

  # Bucket, key, region and the lock come with -backend-config; see backend.hcl.example.
  backend "s3" {}
}

locals {
  # A token of fifteen minutes from the caller's own AWS credentials, for each run: none is kept in the state.
  token = {
    api_version = "client.authentication.k8s.io/v1beta1"
    command     = "aws"
    args = concat(
      ["eks", "get-token", "--output", "json", "--cluster-name", var.cluster_id, "--region", var.region],
      var.profile == "" ? [] : ["--profile", var.profile]
    )
  }
}

provider "aws" {
  region  = var.region
  profile = var.profile == "" ? null : var.profile
}

provider "kubernetes" {
  host                   = var.cluster_endpoint
  cluster_ca_certificate = base64decode(var.cluster_ca)

  exec {
    api_version = local.token.api_version
    command     = local.token.command
    args        = local.token.args
  }
}

provider "helm" {
  kubernetes = {
    host                   = var.cluster_endpoint
    cluster_ca_certificate = base64decode(var.cluster_ca)
    exec                   = local.token
  }
}
