# Every validation of every variable refuses what it should; the run fails if one of those named lets its value pass.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  region       = "us-east-1"
  cluster_name = "fleet"
  azs          = ["us-east-1a", "us-east-1b"]
}

run "a_zone_without_control_planes_is_refused_before_anything_is_created" {
  command = plan
  override_data {
    target = data.aws_availability_zone.used["us-east-1b"]
    values = { zone_id = "use1-az3" }
  }
  expect_failures = [data.aws_availability_zone.used]
}

run "bad_values_are_refused_by_their_variables" {
  command = plan
  variables {
    region                   = "us-east"
    profile                  = "a b"
    cluster_name             = "Fleet_1"
    k8s_version              = "1.29"
    tags                     = { "aws:owner" = "me" }
    public_access_cidrs      = ["0.0.0.0/0"]
    eks_admin_role_arns      = ["Admin"]
    log_retention_days       = 42
    addon_versions           = { istio = "v1.2.3-eksbuild.1" }
    azs                      = []
    existing_vpc_id          = "mine"
    existing_subnet_ids      = ["a", "b"]
    control_plane_az         = "second"
    cidr_vpc                 = "10.0.0.0/8"
    cidr_private             = ["10.0.0.0"]
    cidr_public              = ["ten", "eleven"]
    cidr_control_plane       = "2001:db8::/32"
    efa_az                   = "near"
    interface_endpoints      = ["s3"]
    system_instances         = []
    system_capacity_type     = "on-demand"
    system_volume_size       = 8
    system_group_desired     = 0
    system_group_max         = 1.5
    system_group_min         = -1
    karpenter_namespace      = "Kube_System"
    kubeflow_namespace       = "*"
    trainer_service_accounts = ["*"]
    staging_service_accounts = ["maskfleet-*"]
    import_path              = "https://my-bucket.s3.amazonaws.com/data"
    results_prefix           = "../other"
    data_bucket_kms_key_arn  = "alias/data"
    storage_kms_key_arn      = "alias/data"
    existing_efs_id          = "maskfleet"
    efs_performance_mode     = "fast"
    efs_throughput_mode      = "provisioned"
    fsx_deployment_type      = "SCRATCH_1"
    fsx_storage_capacity     = 3600
    fsx_throughput           = 300
    fsx_az                   = "near"
  }
  expect_failures = [
    var.region,
    var.profile,
    var.cluster_name,
    var.k8s_version,
    var.tags,
    var.public_access_cidrs,
    var.eks_admin_role_arns,
    var.log_retention_days,
    var.addon_versions,
    var.azs,
    var.existing_vpc_id,
    var.existing_subnet_ids,
    var.control_plane_az,
    var.cidr_vpc,
    var.cidr_private,
    var.cidr_public,
    var.cidr_control_plane,
    var.efa_az,
    var.interface_endpoints,
    var.system_instances,
    var.system_capacity_type,
    var.system_volume_size,
    var.system_group_desired,
    var.system_group_max,
    var.system_group_min,
    var.karpenter_namespace,
    var.kubeflow_namespace,
    var.trainer_service_accounts,
    var.staging_service_accounts,
    var.import_path,
    var.results_prefix,
    var.data_bucket_kms_key_arn,
    var.storage_kms_key_arn,
    var.existing_efs_id,
    var.efs_performance_mode,
    var.efs_throughput_mode,
    var.fsx_deployment_type,
    var.fsx_storage_capacity,
    var.fsx_throughput,
    var.fsx_az,
  ]
}

run "more_bad_values_are_refused" {
  command = plan
  variables {
    cluster_name        = "fffffffffffffffffffffffffffffffffffffff"
    k8s_version         = "1.33.2"
    public_access_cidrs = ["0.0.0.0/1", "128.0.0.0/1"]
    eks_admin_role_arns = ["arn:aws:iam::111122223333:role/A", "arn:aws:iam::111122223333:role/A"]
    addon_versions      = { coredns = "latest" }
    azs                 = ["us-east-1a", "us-east-1a"]
    import_path         = "s3://My_Bucket/data"
    kubeflow_namespace  = "kube-system"
  }
  expect_failures = [
    var.cluster_name,
    var.k8s_version,
    var.public_access_cidrs,
    var.eks_admin_role_arns,
    var.addon_versions,
    var.azs,
    var.import_path,
    var.kubeflow_namespace,
  ]
}

run "still_more_bad_values_are_refused" {
  command = plan
  variables {
    public_access_cidrs = ["anywhere"]
    azs                 = ["first"]
  }
  expect_failures = [
    var.public_access_cidrs,
    var.azs,
  ]
}

run "and_the_last" {
  command = plan
  variables {
    public_access_cidrs = ["::/0"]
  }
  expect_failures = [
    var.public_access_cidrs,
  ]
}

run "ranges_must_be_as_many_as_zones" {
  command = plan
  variables {
    cidr_private = ["192.168.64.0/18"]
  }
  expect_failures = [aws_vpc.this]
}

run "public_ranges_must_be_as_many_as_zones" {
  command = plan
  variables {
    azs          = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"]
    cidr_private = ["192.168.64.0/20", "192.168.80.0/20", "192.168.96.0/20", "192.168.112.0/20"]
  }
  expect_failures = [aws_vpc.this]
}

run "zones_are_of_the_region" {
  command = plan
  variables {
    azs = ["us-east-1a", "us-west-2b"]
  }
  expect_failures = [aws_vpc.this]
}

run "the_control_plane_zone_is_another_one" {
  command = plan
  variables {
    azs              = ["us-east-1a"]
    control_plane_az = "us-east-1a"
  }
  expect_failures = [aws_vpc.this]
}

run "ranges_lie_in_the_vpc" {
  command = plan
  variables {
    cidr_vpc = "10.0.0.0/16"
  }
  expect_failures = [aws_vpc.this]
}

run "ranges_do_not_overlap" {
  command = plan
  variables {
    cidr_public = ["192.168.64.0/24", "192.168.1.0/24"]
  }
  expect_failures = [aws_vpc.this]
}

run "efa_is_in_one_of_the_zones" {
  command = plan
  variables {
    efa_az = "us-east-1f"
  }
  expect_failures = [aws_vpc.this]
}

run "group_sizes_are_in_order" {
  command = plan
  variables {
    system_group_min = 4
  }
  expect_failures = [aws_eks_node_group.system]
}

run "scratch_takes_no_throughput" {
  command = plan
  variables {
    fsx_deployment_type = "SCRATCH_2"
    fsx_throughput      = 125
  }
  expect_failures = [aws_fsx_lustre_file_system.this]
}

run "throughput_fits_the_type" {
  command = plan
  variables {
    fsx_throughput = 50
  }
  expect_failures = [aws_fsx_lustre_file_system.this]
}

run "max_io_is_not_elastic" {
  command = plan
  variables {
    efs_performance_mode = "maxIO"
  }
  expect_failures = [aws_efs_file_system.this]
}

run "one_service_account_has_one_role" {
  command = plan
  variables {
    import_path              = "s3://my-bucket/ml-platform"
    staging_service_accounts = ["maskfleet-trainer"]
  }
  expect_failures = [aws_eks_pod_identity_association.data]
}
