# terraform test (1.7 and newer): no credentials, no network, nothing is made.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  region       = "us-east-1"
  cluster_name = "fleet"
  azs          = ["us-east-1a", "us-east-1b"]
}

run "defaults_are_private_durable_and_on_demand" {
  command = apply

  assert {
    condition     = !aws_eks_cluster.this.vpc_config[0].endpoint_public_access && aws_eks_cluster.this.vpc_config[0].endpoint_private_access
    error_message = "the API is public by default"
  }
  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API"
    error_message = "aws-auth is in use"
  }
  assert {
    condition     = aws_eks_cluster.this.upgrade_policy[0].support_type == "STANDARD"
    error_message = "extended support would be billed"
  }
  assert {
    condition     = length(aws_eks_cluster.this.enabled_cluster_log_types) == 5 && contains(aws_eks_cluster.this.encryption_config[0].resources, "secrets")
    error_message = "logs are missing, or secrets are in clear"
  }
  assert {
    condition     = aws_eks_node_group.system.capacity_type == "ON_DEMAND" && aws_eks_node_group.system.ami_type == "AL2023_x86_64_STANDARD"
    error_message = "launchers would live on SPOT or AL2"
  }
  assert {
    condition = (
      aws_launch_template.system.metadata_options[0].http_tokens == "required" &&
      aws_launch_template.system.metadata_options[0].http_put_response_hop_limit == 1 &&
      aws_launch_template.system.block_device_mappings[0].ebs[0].encrypted == "true" &&
      aws_launch_template.system.block_device_mappings[0].ebs[0].volume_type == "gp3"
    )
    error_message = "IMDSv1, more hops, or a disk that is not an encrypted gp3"
  }
  assert {
    condition     = aws_fsx_lustre_file_system.this[0].deployment_type == "PERSISTENT_2" && aws_fsx_lustre_file_system.this[0].per_unit_storage_throughput == 125
    error_message = "FSx is not durable by default"
  }
  assert {
    condition     = length(aws_fsx_data_repository_association.this) == 0 && length(aws_s3_object.results_folder) == 0
    error_message = "FSx is linked without import_path"
  }
  assert {
    condition     = aws_efs_file_system.this[0].encrypted && length(aws_efs_mount_target.this) == 2
    error_message = "EFS is in clear, or not in every zone"
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_subnet.private) == 2 && length(aws_subnet.public) == 2
    error_message = "subnets or NAT gateways are not one per zone, and one"
  }
  assert {
    condition     = aws_subnet.private["us-east-1b"].tags["karpenter.sh/discovery"] == "fleet" && aws_subnet.private["us-east-1b"].tags["kubernetes.io/role/internal-elb"] == "1"
    error_message = "private subnets are not found by Karpenter and internal load balancers"
  }
  assert {
    condition     = aws_subnet.public["us-east-1a"].tags["kubernetes.io/role/elb"] == "1" && !contains(keys(aws_subnet.public["us-east-1a"].tags), "karpenter.sh/discovery")
    error_message = "public subnets are for load balancers and not for nodes"
  }
  assert {
    condition     = toset([for one in merge(aws_eks_addon.before_nodes, aws_eks_addon.after_nodes) : one.addon_name]) == toset(["vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns", "aws-ebs-csi-driver", "aws-efs-csi-driver", "aws-fsx-csi-driver", "eks-node-monitoring-agent"])
    error_message = "add-ons are missing"
  }
  assert {
    condition     = output.trainer_role_arn == "" && output.staging_role_arn == "" && output.load_balancer_role_arn == "" && output.data_bucket == ""
    error_message = "roles that nobody asked for"
  }
  assert {
    condition     = output.efa_az == "us-east-1a" && output.fsx_subnet_az == "us-east-1a" && output.cluster_id == "fleet"
    error_message = "zones or name of the outputs"
  }
}

run "a_bucket_is_linked_and_deletions_are_not_exported" {
  command = apply
  variables {
    import_path = "s3://my-bucket/ml-platform/"
  }

  assert {
    condition     = aws_fsx_data_repository_association.this[0].data_repository_path == "s3://my-bucket/ml-platform"
    error_message = "not the path that was given"
  }
  assert {
    condition     = toset(aws_fsx_data_repository_association.this[0].s3[0].auto_import_policy[0].events) == toset(["NEW", "CHANGED", "DELETED"])
    error_message = "S3 is not followed"
  }
  assert {
    condition     = toset(aws_fsx_data_repository_association.this[0].s3[0].auto_export_policy[0].events) == toset(["NEW", "CHANGED"])
    error_message = "a deletion on FSx would reach S3"
  }
  assert {
    condition     = !aws_fsx_data_repository_association.this[0].delete_data_in_filesystem
    error_message = "unlinking deletes"
  }
  assert {
    condition     = aws_s3_object.results_folder[0].key == "ml-platform/logs/" && aws_s3_object.results_folder[0].metadata["file-owner"] == "1000"
    error_message = "the trainer could not write its results"
  }
  assert {
    condition     = output.data_bucket == "my-bucket" && output.trainer_role_arn != "" && output.staging_role_arn != ""
    error_message = "outputs of the bucket"
  }
  assert {
    condition     = toset([for one in aws_eks_pod_identity_association.data : "${one.namespace}/${one.service_account}"]) == toset(["kubeflow/maskfleet-trainer", "kubeflow/maskfleet-staging"])
    error_message = "service accounts of trainer and staging"
  }
}

run "one_zone_needs_a_second_for_the_control_plane" {
  command = plan
  variables {
    azs = ["us-east-1c"]
  }
  expect_failures = [aws_vpc.this]
}

run "one_zone_with_its_control_plane_zone" {
  command = apply
  variables {
    azs              = ["us-east-1c"]
    control_plane_az = "us-east-1d"
  }

  assert {
    condition     = length(aws_subnet.private) == 1 && length(aws_subnet.control_plane) == 1 && length(aws_eks_cluster.this.vpc_config[0].subnet_ids) == 2
    error_message = "EKS wants two zones"
  }
  assert {
    condition     = length(aws_eks_node_group.system.subnet_ids) == 1 && output.fsx_subnet_az == "us-east-1c"
    error_message = "nodes or FSx left the one zone"
  }
}

run "three_zones_with_a_nat_gateway_each" {
  command = apply
  variables {
    azs                = ["us-east-1a", "us-east-1b", "us-east-1c"]
    nat_gateway_per_az = true
    efa_az             = "us-east-1b"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 3 && length(aws_efs_mount_target.this) == 3 && length(aws_route.nat) == 3
    error_message = "a zone has no NAT gateway or mount target"
  }
  assert {
    condition     = output.efa_az == "us-east-1b" && output.fsx_subnet_az == "us-east-1b"
    error_message = "FSx is not beside the EFA nodes"
  }
}

run "scratch_has_no_throughput_and_no_backup" {
  command = plan
  variables {
    fsx_deployment_type = "SCRATCH_2"
    storage_kms_key_arn = "arn:aws:kms:us-east-1:111122223333:key/ours"
  }

  assert {
    condition     = aws_fsx_lustre_file_system.this[0].skip_final_backup && aws_efs_file_system.this[0].kms_key_id == "arn:aws:kms:us-east-1:111122223333:key/ours"
    error_message = "SCRATCH_2 has no backups; EFS takes the key"
  }
  assert {
    condition     = length(aws_fsx_lustre_file_system.this[0].metadata_configuration) == 0
    error_message = "only PERSISTENT_2 has a metadata configuration"
  }
}

run "persistent_1_takes_its_own_throughputs" {
  command = plan
  variables {
    fsx_deployment_type = "PERSISTENT_1"
    fsx_throughput      = 200
  }

  assert {
    condition     = aws_fsx_lustre_file_system.this[0].per_unit_storage_throughput == 200 && !aws_fsx_lustre_file_system.this[0].skip_final_backup
    error_message = "throughput or final backup of PERSISTENT_1"
  }
}

run "named_addresses_reach_the_api_and_admins_get_entries" {
  command = apply
  variables {
    public_access_cidrs              = ["203.0.113.7/32"]
    eks_admin_role_arns              = ["arn:aws:iam::111122223333:role/Admin"]
    load_balancer_controller_enabled = true
    node_ssm_enabled                 = true
    addon_versions                   = { coredns = "v1.12.1-eksbuild.2" }
  }

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_public_access && aws_eks_cluster.this.vpc_config[0].public_access_cidrs == toset(["203.0.113.7/32"])
    error_message = "public access is not limited to the range"
  }
  assert {
    condition     = length(aws_eks_access_policy_association.admin) == 1 && output.load_balancer_role_arn != ""
    error_message = "administrators or load-balancer role"
  }
  assert {
    condition     = contains(keys(aws_iam_role_policy_attachment.service), "gpu_node/AmazonSSMManagedInstanceCore")
    error_message = "no Session Manager"
  }
  assert {
    condition     = aws_eks_addon.after_nodes["coredns"].addon_version == "v1.12.1-eksbuild.2"
    error_message = "the version of an add-on is not taken"
  }
}

run "without_file_systems" {
  command = apply
  variables {
    fsx_enabled = false
    efs_enabled = false
    import_path = "s3://my-bucket"
  }

  assert {
    condition     = output.efs_id == "" && output.fsx_id == "" && output.efs_dns == "" && output.fsx_dns == "" && output.fsx_mount_name == "" && output.fsx_subnet_az == ""
    error_message = "outputs of file systems that are not there"
  }
  assert {
    condition     = !contains(keys(aws_iam_role.workload), "efs_csi") && !contains(keys(aws_eks_addon.after_nodes), "aws-fsx-csi-driver")
    error_message = "drivers of file systems that are not there"
  }
  assert {
    condition     = output.trainer_role_arn != ""
    error_message = "the bucket may be read without FSx too"
  }
}

run "an_efs_that_was_kept_is_used_again" {
  command = apply
  variables {
    existing_efs_id = "fs-0123456789abcdef0"
  }

  assert {
    condition     = length(aws_efs_file_system.this) == 0 && output.efs_id == "fs-0123456789abcdef0" && length(aws_efs_mount_target.this) == 2
    error_message = "a second file system, or no mount targets"
  }
  assert {
    condition     = output.efs_dns == "fs-0123456789abcdef0.efs.us-east-1.amazonaws.com"
    error_message = "name of the file system"
  }
}

run "interface_endpoints_are_made_for_nodes_if_asked" {
  command = apply
  variables {
    interface_endpoints = ["ecr.api", "sts"]
  }

  assert {
    condition     = toset([for one in aws_vpc_endpoint.interface : one.service_name]) == toset(["com.amazonaws.us-east-1.ecr.api", "com.amazonaws.us-east-1.sts"])
    error_message = "not the services that were asked for"
  }
  assert {
    condition     = alltrue([for one in aws_vpc_endpoint.interface : one.private_dns_enabled && length(one.subnet_ids) >= 1])
    error_message = "pods would still use NAT"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.endpoints[0].from_port == 443 && aws_vpc_security_group_ingress_rule.endpoints[0].referenced_security_group_id == aws_security_group.nodes.id
    error_message = "nodes cannot reach the endpoints, or others can"
  }
}
