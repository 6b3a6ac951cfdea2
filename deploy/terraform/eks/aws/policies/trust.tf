locals {
  service_accounts = {
    vpc_cni       = ["kube-system:aws-node"]
    ebs_csi       = ["kube-system:ebs-csi-controller-sa"]
    efs_csi       = ["kube-system:efs-csi-controller-sa", "kube-system:efs-csi-node-sa"]
    fsx_csi       = ["kube-system:fsx-csi-controller-sa"]
    autoscaler    = ["kube-system:cluster-autoscaler"]
    load_balancer = ["kube-system:aws-load-balancer-controller"]
    karpenter     = ["${var.karpenter_namespace}:karpenter"]
    trainer       = [for name in var.trainer_service_accounts : "${var.kubeflow_namespace}:${name}"]
    staging       = [for name in var.staging_service_accounts : "${var.kubeflow_namespace}:${name}"]
  }

  # These get their role by Pod Identity, which needs no account or ARN in chart values.
  pod_identity = {
    trainer = var.trainer_service_accounts
    staging = var.staging_service_accounts
  }

  cluster_arn = "arn:${var.partition}:eks:${var.region}:${var.account_id}:cluster/${var.cluster_name}"

  by_token = {
    for role, accounts in local.service_accounts : role => {
      Sid       = "ByServiceAccountToken"
      Effect    = "Allow"
      Action    = ["sts:AssumeRoleWithWebIdentity"]
      Principal = { Federated = var.oidc_arn }
      Condition = {
        StringEquals = {
          "${var.oidc_issuer}:aud" = ["sts.amazonaws.com"]
          "${var.oidc_issuer}:sub" = [for account in accounts : "system:serviceaccount:${account}"]
        }
      }
    }
  }

  by_pod_identity = {
    for role, accounts in local.pod_identity : role => {
      Sid       = "ByPodIdentity"
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
      Condition = {
        StringEquals = {
          "aws:RequestTag/eks-cluster-arn"            = [local.cluster_arn]
          "aws:RequestTag/kubernetes-namespace"       = [var.kubeflow_namespace]
          "aws:RequestTag/kubernetes-service-account" = accounts
        }
      }
    }
  }

  # EC2 sends no condition keys when it assumes the role of an instance.
  service_conditions = {
    control_plane = { StringEquals = { "aws:SourceAccount" = [var.account_id] }, ArnEquals = { "aws:SourceArn" = [local.cluster_arn] } }
    flow_logs     = { StringEquals = { "aws:SourceAccount" = [var.account_id] } }
    system_node   = {}
    gpu_node      = {}
  }
  service_names = {
    control_plane = "eks.amazonaws.com"
    flow_logs     = "vpc-flow-logs.amazonaws.com"
    system_node   = "ec2.amazonaws.com"
    gpu_node      = "ec2.amazonaws.com"
  }

  service_trust = {
    for role, service in local.service_names : role => jsonencode({
      Version = "2012-10-17"
      Statement = [merge(
        { Effect = "Allow", Action = ["sts:AssumeRole"], Principal = { Service = service } },
        { for key in ["Condition"] : key => local.service_conditions[role] if length(local.service_conditions[role]) > 0 },
      )]
    })
  }

  workload_trust = {
    for role in keys(local.service_accounts) : role => jsonencode({
      Version = "2012-10-17"
      Statement = concat(
        [local.by_token[role]], [for name, statement in local.by_pod_identity : statement if name == role]
      )
    })
  }
}
