# What the AWS Load Balancer Controller needs for network load balancers of Services, on resources with its cluster tag.
# Application load balancers (certificates, WAF, Shield, Cognito) are not included: no maskfleet chart creates an Ingress.

locals {
  elb        = "arn:${var.partition}:elasticloadbalancing:${var.region}:${var.account_id}"
  elb_groups = "${local.elb}:targetgroup/*/*"
  elb_net    = "${local.elb}:loadbalancer/net/*/*"
  elb_listen = "${local.elb}:listener/net/*/*/*"
  own_groups = ["${local.ec2}:${var.account_id}:security-group/*"]

  elb_request = { StringEquals = { "aws:RequestTag/elbv2.k8s.aws/cluster" = [var.cluster_name] } }
  elb_own     = { StringEquals = { "aws:ResourceTag/elbv2.k8s.aws/cluster" = [var.cluster_name] } }

  load_balancer = [
    {
      Sid       = "MakeServiceLinkedRole"
      Effect    = "Allow"
      Action    = ["iam:CreateServiceLinkedRole"]
      Resource  = ["arn:${var.partition}:iam::${var.account_id}:role/aws-service-role/elasticloadbalancing.amazonaws.com/*"]
      Condition = { StringEquals = { "iam:AWSServiceName" = ["elasticloadbalancing.amazonaws.com"] } }
    },
    {
      Sid    = "See"
      Effect = "Allow"
      Action = [
        "ec2:DescribeAccountAttributes", "ec2:DescribeAddresses", "ec2:DescribeAvailabilityZones", "ec2:DescribeInstances",
        "ec2:DescribeInternetGateways", "ec2:DescribeNetworkInterfaces", "ec2:DescribeRouteTables",
        "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeTags", "ec2:DescribeVpcs",
        "ec2:GetSecurityGroupsForVpc", "elasticloadbalancing:DescribeCapacityReservation",
        "elasticloadbalancing:DescribeListenerAttributes", "elasticloadbalancing:DescribeListenerCertificates",
        "elasticloadbalancing:DescribeListeners", "elasticloadbalancing:DescribeLoadBalancerAttributes",
        "elasticloadbalancing:DescribeLoadBalancers", "elasticloadbalancing:DescribeRules",
        "elasticloadbalancing:DescribeSSLPolicies", "elasticloadbalancing:DescribeTags",
        "elasticloadbalancing:DescribeTargetGroupAttributes", "elasticloadbalancing:DescribeTargetGroups",
        "elasticloadbalancing:DescribeTargetHealth",
      ]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:RequestedRegion" = [var.region] } }
    },
    {
      # By its id: the VPC may be one of others, without a tag of ours.
      Sid      = "MakeSecurityGroupIn"
      Effect   = "Allow"
      Action   = ["ec2:CreateSecurityGroup"]
      Resource = ["${local.ec2}:${var.account_id}:vpc/${var.vpc_id}"]
    },
    {
      Sid       = "MakeSecurityGroup"
      Effect    = "Allow"
      Action    = ["ec2:CreateSecurityGroup"]
      Resource  = local.own_groups
      Condition = local.elb_request
    },
    {
      Sid       = "TagSecurityGroupAtStart"
      Effect    = "Allow"
      Action    = ["ec2:CreateTags"]
      Resource  = local.own_groups
      Condition = { StringEquals = merge(local.elb_request.StringEquals, { "ec2:CreateAction" = ["CreateSecurityGroup"] }) }
    },
    {
      Sid       = "ChangeOwnSecurityGroups"
      Effect    = "Allow"
      Action    = ["ec2:AuthorizeSecurityGroupIngress", "ec2:DeleteSecurityGroup", "ec2:RevokeSecurityGroupIngress"]
      Resource  = local.own_groups
      Condition = local.elb_own
    },
    {
      Sid       = "OpenNodesToBalancers"
      Effect    = "Allow"
      Action    = ["ec2:AuthorizeSecurityGroupIngress", "ec2:RevokeSecurityGroupIngress"]
      Resource  = local.own_groups
      Condition = { StringEquals = { "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = ["owned"] } }
    },
    {
      Sid       = "MakeTagged"
      Effect    = "Allow"
      Action    = ["elasticloadbalancing:CreateLoadBalancer", "elasticloadbalancing:CreateTargetGroup"]
      Resource  = [local.elb_groups, local.elb_net]
      Condition = local.elb_request
    },
    {
      Sid      = "TagAtStart"
      Effect   = "Allow"
      Action   = ["elasticloadbalancing:AddTags"]
      Resource = [local.elb_groups, local.elb_net, local.elb_listen]
      Condition = {
        StringEquals = merge(local.elb_request.StringEquals, {
          "elasticloadbalancing:CreateAction" = ["CreateTargetGroup", "CreateLoadBalancer", "CreateListener"]
        })
      }
    },
    {
      Sid    = "ChangeOwn"
      Effect = "Allow"
      Action = [
        "elasticloadbalancing:AddTags", "elasticloadbalancing:CreateListener", "elasticloadbalancing:DeleteListener",
        "elasticloadbalancing:DeleteLoadBalancer", "elasticloadbalancing:DeleteTargetGroup",
        "elasticloadbalancing:DeregisterTargets", "elasticloadbalancing:ModifyListener",
        "elasticloadbalancing:ModifyListenerAttributes", "elasticloadbalancing:ModifyLoadBalancerAttributes",
        "elasticloadbalancing:ModifyTargetGroup", "elasticloadbalancing:ModifyTargetGroupAttributes",
        "elasticloadbalancing:RegisterTargets", "elasticloadbalancing:RemoveTags", "elasticloadbalancing:SetIpAddressType",
        "elasticloadbalancing:SetSecurityGroups", "elasticloadbalancing:SetSubnets",
      ]
      Resource  = [local.elb_groups, local.elb_net, local.elb_listen]
      Condition = local.elb_own
    },
  ]
}
