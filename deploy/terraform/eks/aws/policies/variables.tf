# IAM documents as functions of names and ARNs, without a provider, so that Terraform alone can show them for any cluster.

variable "cluster_name" {
  description = "Name of the cluster."
  type        = string
}

variable "region" {
  description = "Region of the cluster."
  type        = string
}

variable "account_id" {
  description = "Account of the cluster."
  type        = string
}

variable "partition" {
  description = "AWS partition: aws, aws-cn or aws-us-gov."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the cluster."
  type        = string
}

variable "oidc_arn" {
  description = "ARN of the cluster's OIDC provider."
  type        = string
}

variable "oidc_issuer" {
  description = "Issuer of the cluster's tokens, without https://."
  type        = string
}

variable "kubeflow_namespace" {
  description = "Namespace of training and staging."
  type        = string
}

variable "karpenter_namespace" {
  description = "Namespace of Karpenter."
  type        = string
}

variable "trainer_service_accounts" {
  description = "Service accounts that train."
  type        = list(string)
}

variable "staging_service_accounts" {
  description = "Service accounts that stage data."
  type        = list(string)
}

variable "gpu_node_role_arn" {
  description = "Role that Karpenter gives to its nodes."
  type        = string
}

variable "queue_arn" {
  description = "Queue with interruption notices."
  type        = string
}

variable "interruption_rule_arns" {
  description = "EventBridge rules that write to the queue."
  type        = list(string)
}

variable "log_group_names" {
  description = "Log groups encrypted with the cluster's key."
  type        = list(string)
}

variable "flow_log_group" {
  description = "Name of the log group for VPC flow logs."
  type        = string
}

variable "efs_arn" {
  description = "EFS file system, or empty."
  type        = string
}

variable "fsx_arn" {
  description = "FSx file system, or empty."
  type        = string
}

variable "data_bucket" {
  description = "Bucket of data and results, or empty."
  type        = string
}

variable "data_prefix" {
  description = "Folder of the bucket that may be read; empty is all of it."
  type        = string
}

variable "results_place" {
  description = "Folder of the bucket that may be written."
  type        = string
}

variable "data_key_arn" {
  description = "KMS key of the bucket, or empty."
  type        = string
}
