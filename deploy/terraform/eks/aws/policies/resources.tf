# Documents that belong to a resource instead of a role.

locals {
  cluster_key = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "AccountAdministersByIam"
        Effect    = "Allow"
        Principal = { AWS = "arn:${var.partition}:iam::${var.account_id}:root" }
        Action    = ["kms:*"]
        Resource  = ["*"]
      },
      {
        Sid       = "LogsOfThisCluster"
        Effect    = "Allow"
        Principal = { Service = "logs.${var.region}.amazonaws.com" }
        # What CloudWatch's documentation asks for, without its wildcards.
        Action = [
          "kms:Encrypt", "kms:Decrypt", "kms:ReEncryptFrom", "kms:ReEncryptTo", "kms:DescribeKey",
          "kms:GenerateDataKey", "kms:GenerateDataKeyWithoutPlaintext",
        ]
        Resource = ["*"]
        Condition = {
          ArnEquals = {
            "kms:EncryptionContext:aws:logs:arn" = [
              for name in var.log_group_names : "arn:${var.partition}:logs:${var.region}:${var.account_id}:log-group:${name}"
            ]
          }
        }
      },
    ]
  }

  interruption_queue = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "NoticesFromOurRules"
        Effect    = "Allow"
        Principal = { Service = "events.amazonaws.com" }
        Action    = ["sqs:SendMessage"]
        Resource  = [var.queue_arn]
        Condition = { ArnEquals = { "aws:SourceArn" = var.interruption_rule_arns } }
      },
      {
        Sid       = "OnlyOverTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = ["sqs:*"]
        Resource  = [var.queue_arn]
        Condition = { Bool = { "aws:SecureTransport" = ["false"] } }
      },
    ]
  }

  data_bucket = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OnlyOverTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = ["s3:*"]
        Resource  = ["arn:${var.partition}:s3:::${var.data_bucket}", "arn:${var.partition}:s3:::${var.data_bucket}/*"]
        Condition = { Bool = { "aws:SecureTransport" = ["false"] } }
      },
    ]
  }

  # Any client that reaches a mount target may mount; the security group decides who does. Root access and unencrypted
  # connections are denied.
  efs_clients = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "NodesMount"
        Effect    = "Allow"
        Principal = { AWS = "*" }
        Action    = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
        Resource  = [var.efs_arn]
        Condition = { Bool = { "elasticfilesystem:AccessedViaMountTarget" = ["true"] } }
      },
      {
        Sid       = "OnlyOverTls"
        Effect    = "Deny"
        Principal = { AWS = "*" }
        Action    = ["elasticfilesystem:*"]
        Resource  = [var.efs_arn]
        Condition = { Bool = { "aws:SecureTransport" = ["false"] } }
      },
    ]
  }
}
