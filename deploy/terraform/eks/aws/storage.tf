locals {
  efs_id = !var.efs_enabled ? "" : var.existing_efs_id == "" ? aws_efs_file_system.this[0].id : var.existing_efs_id

  # All maskfleet pods run as this user and group.
  fleet_id = 1000

  fsx_least_throughput = { SCRATCH_2 = null, PERSISTENT_1 = 50, PERSISTENT_2 = 125 }
  fsx_throughputs      = { SCRATCH_2 = [], PERSISTENT_1 = [50, 100, 200], PERSISTENT_2 = [125, 250, 500, 1000] }
  fsx_persistent       = var.fsx_deployment_type != "SCRATCH_2"
  fsx_linked           = var.fsx_enabled && var.import_path != ""

  import_parts  = split("/", trimsuffix(trimprefix(var.import_path, "s3://"), "/"))
  data_bucket   = local.import_parts[0]
  data_prefix   = join("/", slice(local.import_parts, 1, length(local.import_parts)))
  results_place = join("/", compact([local.data_prefix, var.results_prefix]))
}

resource "aws_efs_file_system" "this" {
  #checkov:skip=CKV_AWS_184:storage_kms_key_arn names a customer key; a key of this root would die with the cluster and take kept data with it
  count = var.efs_enabled && var.existing_efs_id == "" ? 1 : 0

  creation_token   = var.cluster_name
  encrypted        = true
  kms_key_id       = var.storage_kms_key_arn == "" ? null : var.storage_kms_key_arn
  performance_mode = var.efs_performance_mode
  throughput_mode  = var.efs_throughput_mode
  tags             = { Name = var.cluster_name }

  lifecycle {
    precondition {
      condition     = !(var.efs_performance_mode == "maxIO" && var.efs_throughput_mode == "elastic")
      error_message = "efs_throughput_mode elastic requires efs_performance_mode generalPurpose."
    }
  }
}

resource "aws_efs_backup_policy" "this" {
  count = length(aws_efs_file_system.this)

  file_system_id = aws_efs_file_system.this[0].id
  backup_policy {
    status = var.efs_backup_enabled ? "ENABLED" : "DISABLED"
  }
}

resource "aws_efs_file_system_policy" "this" {
  count = length(aws_efs_file_system.this)

  file_system_id = aws_efs_file_system.this[0].id
  policy         = module.policies.efs_clients
}

# The root directory of a file system belongs to root; pods that do not run as root use a directory of their own.
resource "aws_efs_access_point" "fleet" {
  count = var.efs_enabled ? 1 : 0

  file_system_id = local.efs_id
  tags           = { Name = "${var.cluster_name}-fleet" }

  posix_user {
    uid = local.fleet_id
    gid = local.fleet_id
  }

  root_directory {
    path = "/maskfleet"
    creation_info {
      owner_uid   = local.fleet_id
      owner_gid   = local.fleet_id
      permissions = "0775"
    }
  }
}

resource "aws_efs_mount_target" "this" {
  for_each = var.efs_enabled ? toset(var.azs) : []

  file_system_id  = local.efs_id
  subnet_id       = local.private_subnets[each.key]
  security_groups = [aws_security_group.efs[0].id]
}

resource "aws_security_group" "efs" {
  count = var.efs_enabled ? 1 : 0

  name        = "${var.cluster_name}-efs"
  description = "NFS from the nodes of ${var.cluster_name}"
  vpc_id      = local.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "efs" {
  count = var.efs_enabled ? 1 : 0

  security_group_id            = aws_security_group.efs[0].id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
  description                  = "NFS from nodes"
}

resource "aws_cloudwatch_log_group" "fsx" {
  count = var.fsx_enabled ? 1 : 0

  name              = "/aws/fsx/${var.cluster_name}"
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.cluster.arn
}

resource "aws_fsx_lustre_file_system" "this" {
  #checkov:skip=CKV_AWS_190:storage_kms_key_arn names a customer key; SCRATCH_2 takes none
  count = var.fsx_enabled ? 1 : 0

  deployment_type             = var.fsx_deployment_type
  storage_capacity            = var.fsx_storage_capacity
  per_unit_storage_throughput = local.fsx_persistent ? coalesce(var.fsx_throughput, local.fsx_least_throughput[var.fsx_deployment_type]) : null
  file_system_type_version    = "2.15"
  data_compression_type       = "LZ4"
  subnet_ids                  = [local.private_subnets[local.fsx_az]]
  security_group_ids          = [aws_security_group.fsx[0].id]
  kms_key_id                  = local.fsx_persistent && var.storage_kms_key_arn != "" ? var.storage_kms_key_arn : null
  # A file system that is linked to S3 cannot have backups: S3 is the copy.
  automatic_backup_retention_days = local.fsx_persistent && !local.fsx_linked ? 7 : null
  skip_final_backup               = !local.fsx_persistent || local.fsx_linked
  tags                            = { Name = var.cluster_name }

  log_configuration {
    level       = "WARN_ERROR"
    destination = aws_cloudwatch_log_group.fsx[0].arn
  }

  dynamic "metadata_configuration" {
    for_each = var.fsx_deployment_type == "PERSISTENT_2" ? ["AUTOMATIC"] : []
    content {
      mode = metadata_configuration.value
    }
  }

  lifecycle {
    precondition {
      condition     = var.fsx_throughput == null || contains(local.fsx_throughputs[var.fsx_deployment_type], coalesce(var.fsx_throughput, 0))
      error_message = "fsx_throughput ${coalesce(var.fsx_throughput, 0)} is not valid for ${var.fsx_deployment_type}: ${local.fsx_persistent ? join(", ", local.fsx_throughputs[var.fsx_deployment_type]) : "leave it null"}."
    }
  }

  # FSx refuses a file system whose security group does not allow Lustre's ports yet.
  depends_on = [aws_vpc_security_group_ingress_rule.fsx, aws_vpc_security_group_egress_rule.fsx]
}

# FSx reads owner and mode of a directory from its S3 object; without it root would own the directory, and the trainer does not run as root.
resource "aws_s3_object" "results_folder" {
  #checkov:skip=CKV_AWS_186:an empty folder marker in a bucket whose own default encryption applies
  count = local.fsx_linked ? 1 : 0

  bucket       = local.data_bucket
  key          = "${local.results_place}/"
  content      = ""
  content_type = "application/x-directory"
  metadata = {
    user-agent       = "aws-fsx-lustre"
    file-permissions = "0040775"
    file-owner       = tostring(local.fleet_id)
    file-group       = tostring(local.fleet_id)
  }

  # An S3 object has at most ten tags.
  override_provider {
    default_tags {
      tags = {}
    }
  }

  depends_on = [aws_s3_bucket_versioning.data, aws_s3_bucket_server_side_encryption_configuration.data]

  lifecycle {
    # FSx writes the object back with timestamps added.
    ignore_changes = [metadata, content_type]
  }
}

resource "aws_fsx_data_repository_association" "this" {
  count = local.fsx_linked ? 1 : 0

  file_system_id                   = aws_fsx_lustre_file_system.this[0].id
  file_system_path                 = "/"
  data_repository_path             = trimsuffix(var.import_path, "/")
  batch_import_meta_data_on_create = true
  delete_data_in_filesystem        = false

  s3 {
    auto_import_policy {
      events = ["NEW", "CHANGED", "DELETED"]
    }
    # Never DELETED: what a job deletes by mistake stays in S3.
    auto_export_policy {
      events = ["NEW", "CHANGED"]
    }
  }

  # The provider's ten minutes are too few for some buckets; a link that was given up would be deleted and made again.
  timeouts {
    create = "60m"
    update = "30m"
    delete = "30m"
  }

  depends_on = [aws_s3_object.results_folder]
}

resource "aws_security_group" "fsx" {
  count = var.fsx_enabled ? 1 : 0

  name        = "${var.cluster_name}-fsx"
  description = "Lustre between the nodes of ${var.cluster_name} and its file servers"
  vpc_id      = local.vpc_id
}

locals {
  lustre_ports = { data = [988, 988], clients = [1018, 1023] }
  lustre_peers = var.fsx_enabled ? {
    nodes   = aws_security_group.nodes.id
    servers = aws_security_group.fsx[0].id
  } : {}
  lustre_rules = {
    for pair in setproduct(var.fsx_enabled ? ["nodes", "servers"] : [], keys(local.lustre_ports)) :
    join("-", pair) => { peer = pair[0], ports = local.lustre_ports[pair[1]] }
  }
}

resource "aws_vpc_security_group_ingress_rule" "fsx" {
  for_each = local.lustre_rules

  security_group_id            = aws_security_group.fsx[0].id
  referenced_security_group_id = local.lustre_peers[each.value.peer]
  ip_protocol                  = "tcp"
  from_port                    = each.value.ports[0]
  to_port                      = each.value.ports[1]
  description                  = "Lustre from ${each.value.peer}"
}

resource "aws_vpc_security_group_egress_rule" "fsx" {
  for_each = local.lustre_rules

  security_group_id            = aws_security_group.fsx[0].id
  referenced_security_group_id = local.lustre_peers[each.value.peer]
  ip_protocol                  = "tcp"
  from_port                    = each.value.ports[0]
  to_port                      = each.value.ports[1]
  description                  = "Lustre to ${each.value.peer}"
}

# File servers open connections to clients; otherwise the nodes' security group allows only itself and the control plane.
resource "aws_vpc_security_group_ingress_rule" "lustre_clients" {
  for_each = { for name, ports in local.lustre_ports : name => ports if var.fsx_enabled }

  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.fsx[0].id
  ip_protocol                  = "tcp"
  from_port                    = each.value[0]
  to_port                      = each.value[1]
  description                  = "Lustre from file servers"
}
