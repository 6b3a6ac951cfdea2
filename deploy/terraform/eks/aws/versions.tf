terraform {
  required_version = ">= 1.5.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100.0, < 7.0.0"
    }
  }

  # Bucket, key, region and the lock come with -backend-config; see backend.hcl.example.
  backend "s3" {}
}

provider "aws" {
  region  = var.region
  profile = var.profile == "" ? null : var.profile

  default_tags {
    tags = merge({ "maskfleet/cluster" = var.cluster_name }, var.tags)
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}
