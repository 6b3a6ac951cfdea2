locals {
  bucket_arn = "arn:${var.partition}:s3:::${var.data_bucket}"
  data_arn   = join("/", compact([local.bucket_arn, var.data_prefix, "*"]))

  read_data = concat(
    [
      merge(
        {
          Sid      = "ListData"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [local.bucket_arn]
        },
        {
          for key in ["Condition"] : key => { StringLike = { "s3:prefix" = [var.data_prefix, "${var.data_prefix}/*"] } }
          if var.data_prefix != ""
        },
      ),
      {
        Sid      = "FindBucket"
        Effect   = "Allow"
        Action   = ["s3:GetBucketLocation"]
        Resource = [local.bucket_arn]
      },
      {
        Sid      = "ReadData"
        Effect   = "Allow"
        Action   = ["s3:GetObject"]
        Resource = [local.data_arn]
      },
    ],
    [
      for statement in [{
        Sid       = "DecryptData"
        Effect    = "Allow"
        Action    = ["kms:Decrypt"]
        Resource  = [var.data_key_arn]
        Condition = local.via_s3
      }] : statement if var.data_key_arn != ""
    ],
  )

  # No s3:DeleteObject anywhere: results are added, never deleted.
  write_results = concat(
    [
      {
        Sid      = "WriteResults"
        Effect   = "Allow"
        Action   = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
        Resource = ["${local.bucket_arn}/${var.results_place}/*"]
      },
    ],
    [
      for statement in [{
        Sid       = "EncryptResults"
        Effect    = "Allow"
        Action    = ["kms:GenerateDataKey"]
        Resource  = [var.data_key_arn]
        Condition = local.via_s3
      }] : statement if var.data_key_arn != ""
    ],
  )
  via_s3 = { StringEquals = { "kms:ViaService" = ["s3.${var.region}.amazonaws.com"] } }

  # Volumes are referenced by id: the drivers read, and create nothing.
  efs_csi = [
    {
      Sid    = "SeeFileSystem"
      Effect = "Allow"
      Action = [
        "elasticfilesystem:DescribeFileSystems", "elasticfilesystem:DescribeMountTargets",
        "elasticfilesystem:DescribeAccessPoints",
      ]
      Resource = [var.efs_arn]
    },
    {
      Sid       = "SeeZones"
      Effect    = "Allow"
      Action    = ["ec2:DescribeAvailabilityZones"]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = [var.region] } }
    },
  ]
  fsx_csi = [
    {
      Sid      = "SeeFileSystem"
      Effect   = "Allow"
      Action   = ["fsx:DescribeFileSystems"]
      Resource = [var.fsx_arn]
    },
  ]

  autoscaler = [
    {
      Sid    = "SeeGroups"
      Effect = "Allow"
      Action = [
        "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeAutoScalingInstances",
        "autoscaling:DescribeLaunchConfigurations", "autoscaling:DescribeScalingActivities", "autoscaling:DescribeTags",
        "ec2:DescribeImages", "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplateVersions",
        "ec2:GetInstanceTypesFromInstanceRequirements",
      ]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = [var.region] } }
    },
    {
      Sid      = "SeeNodeGroups"
      Effect   = "Allow"
      Action   = ["eks:DescribeNodegroup"]
      Resource = ["arn:${var.partition}:eks:${var.region}:${var.account_id}:nodegroup/${var.cluster_name}/*"]
    },
    {
      Sid       = "ScaleOwnGroups"
      Effect    = "Allow"
      Action    = ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"]
      Resource  = ["arn:${var.partition}:autoscaling:${var.region}:${var.account_id}:autoScalingGroup:*:autoScalingGroupName/*"]
      Condition = { StringEquals = { "aws:ResourceTag/k8s.io/cluster-autoscaler/${var.cluster_name}" = ["owned"] } }
    },
  ]

  flow_logs = [
    {
      Sid      = "WriteFlows"
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
      Resource = ["arn:${var.partition}:logs:${var.region}:${var.account_id}:log-group:${var.flow_log_group}:*"]
    },
    {
      Sid      = "FindFlowGroup"
      Effect   = "Allow"
      Action   = ["logs:DescribeLogGroups"]
      Resource = ["arn:${var.partition}:logs:${var.region}:${var.account_id}:log-group:*"]
    },
  ]
}
