# The permissions of Karpenter's reference policy, limited to this account: it may start instances with the cluster's tags,
# and terminate only those.

locals {
  ec2       = "arn:${var.partition}:ec2:${var.region}"
  owned_tag = "kubernetes.io/cluster/${var.cluster_name}"
  started = [
    for kind in ["fleet", "instance", "volume", "network-interface", "launch-template", "spot-instances-request"] :
    "${local.ec2}:${var.account_id}:${kind}/*"
  ]
  profiles = ["arn:${var.partition}:iam::${var.account_id}:instance-profile/*"]
  request_tagged = {
    "aws:RequestTag/${local.owned_tag}"   = ["owned"]
    "aws:RequestTag/eks:eks-cluster-name" = [var.cluster_name]
  }
  resource_tagged = { "aws:ResourceTag/${local.owned_tag}" = ["owned"] }
  in_region       = { "aws:ResourceTag/topology.kubernetes.io/region" = [var.region] }

  karpenter_nodes = [
    {
      Sid    = "StartFromWhatIsThere"
      Effect = "Allow"
      Action = ["ec2:RunInstances", "ec2:CreateFleet"]
      Resource = concat(
        ["${local.ec2}::image/*", "${local.ec2}::snapshot/*"],
        [for kind in ["security-group", "subnet", "capacity-reservation", "placement-group"] : "${local.ec2}:${var.account_id}:${kind}/*"],
      )
    },
    {
      Sid      = "StartFromOwnTemplates"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances", "ec2:CreateFleet"]
      Resource = ["${local.ec2}:${var.account_id}:launch-template/*"]
      Condition = {
        StringEquals = local.resource_tagged
        StringLike   = { "aws:ResourceTag/karpenter.sh/nodepool" = ["*"] }
      }
    },
    {
      Sid      = "StartTagged"
      Effect   = "Allow"
      Action   = ["ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateLaunchTemplate"]
      Resource = local.started
      Condition = {
        StringEquals = local.request_tagged
        StringLike   = { "aws:RequestTag/karpenter.sh/nodepool" = ["*"] }
      }
    },
    {
      Sid      = "TagAtStart"
      Effect   = "Allow"
      Action   = ["ec2:CreateTags"]
      Resource = local.started
      Condition = {
        StringEquals = merge(local.request_tagged, {
          "ec2:CreateAction" = ["RunInstances", "CreateFleet", "CreateLaunchTemplate"]
        })
        StringLike = { "aws:RequestTag/karpenter.sh/nodepool" = ["*"] }
      }
    },
    {
      Sid      = "TagOwnInstances"
      Effect   = "Allow"
      Action   = ["ec2:CreateTags"]
      Resource = ["${local.ec2}:${var.account_id}:instance/*"]
      Condition = {
        StringEquals                = local.resource_tagged
        StringLike                  = { "aws:ResourceTag/karpenter.sh/nodepool" = ["*"] }
        StringEqualsIfExists        = { "aws:RequestTag/eks:eks-cluster-name" = [var.cluster_name] }
        "ForAllValues:StringEquals" = { "aws:TagKeys" = ["eks:eks-cluster-name", "karpenter.sh/nodeclaim", "Name"] }
      }
    },
    {
      Sid      = "EndOwn"
      Effect   = "Allow"
      Action   = ["ec2:TerminateInstances", "ec2:DeleteLaunchTemplate"]
      Resource = [for kind in ["instance", "launch-template"] : "${local.ec2}:${var.account_id}:${kind}/*"]
      Condition = {
        StringEquals = local.resource_tagged
        StringLike   = { "aws:ResourceTag/karpenter.sh/nodepool" = ["*"] }
      }
    },
  ]

  karpenter_reads = [
    {
      Sid    = "SeeRegion"
      Effect = "Allow"
      Action = [
        "ec2:DescribeCapacityReservations", "ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeInstanceStatus",
        "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplates",
        "ec2:DescribePlacementGroups", "ec2:DescribeSecurityGroups", "ec2:DescribeSpotPriceHistory", "ec2:DescribeSubnets",
      ]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = [var.region] } }
    },
    {
      Sid      = "SeeImages"
      Effect   = "Allow"
      Action   = ["ssm:GetParameter"]
      Resource = ["arn:${var.partition}:ssm:${var.region}::parameter/aws/service/*"]
    },
    {
      Sid      = "SeePrices"
      Effect   = "Allow"
      Action   = ["pricing:GetProducts"]
      Resource = ["*"]
    },
    {
      Sid      = "SeeCluster"
      Effect   = "Allow"
      Action   = ["eks:DescribeCluster"]
      Resource = [local.cluster_arn]
    },
    {
      Sid      = "TakeNotices"
      Effect   = "Allow"
      Action   = ["sqs:DeleteMessage", "sqs:GetQueueUrl", "sqs:ReceiveMessage"]
      Resource = [var.queue_arn]
    },
  ]

  karpenter_profiles = [
    {
      Sid       = "GiveNodesTheirRole"
      Effect    = "Allow"
      Action    = ["iam:PassRole"]
      Resource  = [var.gpu_node_role_arn]
      Condition = { StringEquals = { "iam:PassedToService" = ["ec2.amazonaws.com"] } }
    },
    {
      Sid      = "MakeProfiles"
      Effect   = "Allow"
      Action   = ["iam:CreateInstanceProfile"]
      Resource = local.profiles
      Condition = {
        StringEquals = merge(local.request_tagged, { "aws:RequestTag/topology.kubernetes.io/region" = [var.region] })
        StringLike   = { "aws:RequestTag/karpenter.k8s.aws/ec2nodeclass" = ["*"] }
      }
    },
    {
      Sid      = "TagProfiles"
      Effect   = "Allow"
      Action   = ["iam:TagInstanceProfile"]
      Resource = local.profiles
      Condition = {
        StringEquals = merge(
          local.request_tagged, local.resource_tagged, local.in_region,
          { "aws:RequestTag/topology.kubernetes.io/region" = [var.region] },
        )
        StringLike = {
          "aws:ResourceTag/karpenter.k8s.aws/ec2nodeclass" = ["*"]
          "aws:RequestTag/karpenter.k8s.aws/ec2nodeclass"  = ["*"]
        }
      }
    },
    {
      Sid      = "ChangeOwnProfiles"
      Effect   = "Allow"
      Action   = ["iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile", "iam:DeleteInstanceProfile"]
      Resource = local.profiles
      Condition = {
        StringEquals = merge(local.resource_tagged, local.in_region)
        StringLike   = { "aws:ResourceTag/karpenter.k8s.aws/ec2nodeclass" = ["*"] }
      }
    },
    {
      Sid      = "SeeProfiles"
      Effect   = "Allow"
      Action   = ["iam:GetInstanceProfile"]
      Resource = local.profiles
    },
    {
      Sid      = "ListProfiles"
      Effect   = "Allow"
      Action   = ["iam:ListInstanceProfiles"]
      Resource = ["*"]
    },
  ]
}
