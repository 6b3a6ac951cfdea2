locals {
  account_id = data.aws_caller_identity.current.account_id
  partition  = data.aws_partition.current.partition
  managed    = "arn:${local.partition}:iam::aws:policy"

  node_policies = concat(
    ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"],
    var.node_ssm_enabled ? ["AmazonSSMManagedInstanceCore"] : [],
  )
  service_policies = {
    control_plane = ["AmazonEKSClusterPolicy"]
    system_node   = local.node_policies
    gpu_node      = local.node_policies
    flow_logs     = []
  }
  service_attachments = merge([
    for role, names in local.service_policies : { for name in names : "${role}/${name}" => { role = role, name = name } }
  ]...)

  data_roles = var.import_path == "" ? [] : ["trainer", "staging"]
  workload_roles = toset(concat(
    ["vpc_cni", "ebs_csi", "autoscaler", "karpenter"],
    var.efs_enabled ? ["efs_csi"] : [],
    var.fsx_enabled ? ["fsx_csi"] : [],
    var.load_balancer_controller_enabled ? ["load_balancer"] : [],
    local.data_roles,
  ))
  workload_managed = {
    vpc_cni = "AmazonEKS_CNI_Policy"
    ebs_csi = "service-role/AmazonEBSCSIDriverPolicy"
  }
  workload_inline = {
    karpenter     = ["nodes", "reads", "profiles"]
    autoscaler    = ["scale"]
    load_balancer = ["make"]
    efs_csi       = ["see"]
    fsx_csi       = ["see"]
    trainer       = ["data"]
    staging       = ["data"]
  }
  workload_policies = merge([
    for role, names in local.workload_inline : { for name in names : "${role}/${name}" => { role = role, name = name } }
    if contains(local.workload_roles, role)
  ]...)

  log_groups = concat(
    ["/aws/eks/${var.cluster_name}/cluster", "/aws/vpc/${var.cluster_name}/flow"],
    var.fsx_enabled ? ["/aws/fsx/${var.cluster_name}"] : [],
  )

  pod_identities = merge([
    for role, accounts in { trainer = var.trainer_service_accounts, staging = var.staging_service_accounts } :
    { for account in accounts : "${role}/${account}" => { role = role, account = account } }
    if contains(local.data_roles, role)
  ]...)
}

module "policies" {
  source = "./policies"

  cluster_name             = var.cluster_name
  region                   = var.region
  account_id               = local.account_id
  partition                = local.partition
  vpc_id                   = local.vpc_id
  oidc_arn                 = aws_iam_openid_connect_provider.this.arn
  oidc_issuer              = trimprefix(aws_eks_cluster.this.identity[0].oidc[0].issuer, "https://")
  kubeflow_namespace       = var.kubeflow_namespace
  karpenter_namespace      = var.karpenter_namespace
  trainer_service_accounts = var.trainer_service_accounts
  staging_service_accounts = var.staging_service_accounts
  gpu_node_role_arn        = "arn:${local.partition}:iam::${local.account_id}:role/${var.cluster_name}-gpu-node"
  queue_arn                = "arn:${local.partition}:sqs:${var.region}:${local.account_id}:${var.cluster_name}-karpenter"
  interruption_rule_arns = [
    for event in keys(local.interruption_events) :
    "arn:${local.partition}:events:${var.region}:${local.account_id}:rule/${var.cluster_name}-karpenter-${replace(event, "_", "-")}"
  ]
  log_group_names = local.log_groups
  flow_log_group  = "/aws/vpc/${var.cluster_name}/flow"
  efs_arn         = var.efs_enabled ? "arn:${local.partition}:elasticfilesystem:${var.region}:${local.account_id}:file-system/${local.efs_id}" : ""
  fsx_arn         = var.fsx_enabled ? aws_fsx_lustre_file_system.this[0].arn : ""
  data_bucket     = local.data_bucket
  data_prefix     = local.data_prefix
  results_place   = local.results_place
  data_key_arn    = var.data_bucket_kms_key_arn
}

# Taken by AWS services.
resource "aws_iam_role" "service" {
  for_each = local.service_policies

  name               = "${var.cluster_name}-${replace(each.key, "_", "-")}"
  assume_role_policy = module.policies.service_trust[each.key]
}

resource "aws_iam_role_policy_attachment" "service" {
  for_each = local.service_attachments

  role       = aws_iam_role.service[each.value.role].name
  policy_arn = "${local.managed}/${each.value.name}"
}

resource "aws_iam_role_policy" "flow_logs" {
  name   = "write"
  role   = aws_iam_role.service["flow_logs"].id
  policy = module.policies.flow_logs
}

# Taken by service accounts of the cluster, each by its own alone.
resource "aws_iam_role" "workload" {
  for_each = local.workload_roles

  name               = "${var.cluster_name}-${replace(each.key, "_", "-")}"
  assume_role_policy = module.policies.workload_trust[each.key]
}

resource "aws_iam_role_policy_attachment" "workload" {
  for_each = local.workload_managed

  role       = aws_iam_role.workload[each.key].name
  policy_arn = "${local.managed}/${each.value}"
}

resource "aws_iam_role_policy" "workload" {
  for_each = local.workload_policies

  name   = each.value.name
  role   = aws_iam_role.workload[each.value.role].id
  policy = module.policies.permissions[each.key]
}

resource "aws_eks_pod_identity_association" "data" {
  for_each = local.pod_identities

  cluster_name    = aws_eks_cluster.this.name
  namespace       = var.kubeflow_namespace
  service_account = each.value.account
  role_arn        = aws_iam_role.workload[each.value.role].arn

  lifecycle {
    precondition {
      condition     = length(setintersection(var.trainer_service_accounts, var.staging_service_accounts)) == 0
      error_message = "trainer_service_accounts and staging_service_accounts share a name; one account has one role."
    }
  }
}
