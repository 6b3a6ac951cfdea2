# A VPC of others, a bucket of our own, and a placement group: what is made, and what is refused.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  region              = "us-east-1"
  cluster_name        = "fleet"
  azs                 = ["us-east-1a", "us-east-1b"]
  existing_vpc_id     = "vpc-0123456789abcdef0"
  existing_subnet_ids = ["subnet-0000000a", "subnet-0000000b"]
}

override_data {
  target = data.aws_vpc.existing
  values = { id = "vpc-0123456789abcdef0", enable_dns_support = true, enable_dns_hostnames = true }
}
override_data {
  target = data.aws_subnet.existing["us-east-1a"]
  values = {
    id                         = "subnet-0000000a"
    vpc_id                     = "vpc-0123456789abcdef0"
    availability_zone          = "us-east-1a"
    available_ip_address_count = 4000
    tags                       = { "karpenter.sh/discovery" = "fleet" }
  }
}
override_data {
  target = data.aws_subnet.existing["us-east-1b"]
  values = {
    id                         = "subnet-0000000b"
    vpc_id                     = "vpc-0123456789abcdef0"
    availability_zone          = "us-east-1b"
    available_ip_address_count = 4000
    tags                       = { "karpenter.sh/discovery" = "fleet" }
  }
}
override_data {
  target = data.aws_route_table.existing["us-east-1a"]
  values = {
    routes = [{
      cidr_block                = "0.0.0.0/0", gateway_id = "", nat_gateway_id = "nat-1", ipv6_cidr_block = "",
      carrier_gateway_id        = "", core_network_arn = "", destination_prefix_list_id = "", egress_only_gateway_id = "",
      instance_id               = "", local_gateway_id = "", network_interface_id = "", transit_gateway_id = "", vpc_endpoint_id = "",
      vpc_peering_connection_id = ""
    }]
  }
}
override_data {
  target = data.aws_route_table.existing["us-east-1b"]
  values = {
    routes = [{
      cidr_block                = "0.0.0.0/0", gateway_id = "", nat_gateway_id = "nat-1", ipv6_cidr_block = "",
      carrier_gateway_id        = "", core_network_arn = "", destination_prefix_list_id = "", egress_only_gateway_id = "",
      instance_id               = "", local_gateway_id = "", network_interface_id = "", transit_gateway_id = "", vpc_endpoint_id = "",
      vpc_peering_connection_id = ""
    }]
  }
}
run "an_existing_vpc_is_used_and_not_changed" {
  command = apply

  assert {
    condition     = length(aws_vpc.this) + length(aws_subnet.private) + length(aws_subnet.public) + length(aws_nat_gateway.this) + length(aws_route_table.private) + length(aws_vpc_endpoint.s3) + length(aws_flow_log.this) + length(aws_default_security_group.this) == 0
    error_message = "something was created in a network of others"
  }
  assert {
    condition     = toset(aws_eks_cluster.this.vpc_config[0].subnet_ids) == toset(var.existing_subnet_ids) && toset(aws_eks_node_group.system.subnet_ids) == toset(var.existing_subnet_ids)
    error_message = "not the subnets that were given"
  }
  assert {
    condition     = output.cluster_vpc == "vpc-0123456789abcdef0" && toset(output.cluster_subnets) == toset(var.existing_subnet_ids)
    error_message = "outputs"
  }
  assert {
    condition     = aws_security_group.nodes.vpc_id == "vpc-0123456789abcdef0" && aws_efs_mount_target.this["us-east-1b"].subnet_id == "subnet-0000000b" && aws_fsx_lustre_file_system.this[0].subnet_ids[0] == "subnet-0000000a"
    error_message = "file systems are elsewhere"
  }
}

run "as_many_subnets_as_zones" {
  command = plan
  variables {
    existing_subnet_ids = ["subnet-0000000a"]
  }

  expect_failures = [data.aws_vpc.existing]
}

run "two_zones" {
  command = plan
  variables {
    azs                 = ["us-east-1a"]
    existing_subnet_ids = ["subnet-0000000a"]
  }

  expect_failures = [data.aws_vpc.existing]
}

run "dns_names" {
  command = plan
  override_data {
    target = data.aws_vpc.existing
    values = { id = "vpc-0123456789abcdef0", enable_dns_support = true, enable_dns_hostnames = false }
  }

  expect_failures = [data.aws_vpc.existing]
}

run "subnets_of_this_vpc" {
  command = plan
  override_data {
    target = data.aws_subnet.existing["us-east-1a"]
    values = {
      id                         = "subnet-0000000a"
      vpc_id                     = "vpc-1"
      availability_zone          = "us-east-1a"
      available_ip_address_count = 4000
      tags                       = { "karpenter.sh/discovery" = "fleet" }
    }
  }

  expect_failures = [data.aws_subnet.existing["us-east-1a"]]
}

run "subnets_in_the_order_of_zones" {
  command = plan
  override_data {
    target = data.aws_subnet.existing["us-east-1a"]
    values = {
      id                         = "subnet-0000000a"
      vpc_id                     = "vpc-0123456789abcdef0"
      availability_zone          = "us-east-1b"
      available_ip_address_count = 4000
      tags                       = { "karpenter.sh/discovery" = "fleet" }
    }
  }

  expect_failures = [data.aws_subnet.existing["us-east-1a"]]
}

run "subnets_with_free_addresses" {
  command = plan
  override_data {
    target = data.aws_subnet.existing["us-east-1a"]
    values = {
      id                         = "subnet-0000000a"
      vpc_id                     = "vpc-0123456789abcdef0"
      availability_zone          = "us-east-1a"
      available_ip_address_count = 12
      tags                       = { "karpenter.sh/discovery" = "fleet" }
    }
  }

  expect_failures = [data.aws_subnet.existing["us-east-1a"]]
}

run "subnets_with_the_tag_that_karpenter_looks_for" {
  command = plan
  override_data {
    target = data.aws_subnet.existing["us-east-1a"]
    values = {
      id                         = "subnet-0000000a"
      vpc_id                     = "vpc-0123456789abcdef0"
      availability_zone          = "us-east-1a"
      available_ip_address_count = 4000
      tags                       = { "karpenter.sh/discovery" = "other" }
    }
  }

  expect_failures = [data.aws_subnet.existing["us-east-1a"]]
}

run "with_the_tag_for_load_balancers" {
  command = plan
  variables {
    load_balancer_controller_enabled = true
  }

  expect_failures = [data.aws_subnet.existing["us-east-1a"], data.aws_subnet.existing["us-east-1b"]]
}

run "an_internet_gateway_is_no_way_out_for_nodes" {
  command = plan
  override_data {
    target = data.aws_route_table.existing["us-east-1a"]
    values = {
      routes = [{
        cidr_block                = "0.0.0.0/0", gateway_id = "igw-1", nat_gateway_id = "", ipv6_cidr_block = "",
        carrier_gateway_id        = "", core_network_arn = "", destination_prefix_list_id = "", egress_only_gateway_id = "",
        instance_id               = "", local_gateway_id = "", network_interface_id = "", transit_gateway_id = "", vpc_endpoint_id = "",
        vpc_peering_connection_id = ""
      }]
    }
  }

  expect_failures = [data.aws_route_table.existing["us-east-1a"]]
}

run "endpoints_replace_the_way_out" {
  command = plan
  variables {
    interface_endpoints = ["ecr.api", "ecr.dkr", "ec2", "sts", "eks"]
  }
  override_data {
    target = data.aws_route_table.existing["us-east-1a"]
    values = {
      routes = [{
        cidr_block                = "0.0.0.0/0", gateway_id = "igw-1", nat_gateway_id = "", ipv6_cidr_block = "",
        carrier_gateway_id        = "", core_network_arn = "", destination_prefix_list_id = "", egress_only_gateway_id = "",
        instance_id               = "", local_gateway_id = "", network_interface_id = "", transit_gateway_id = "", vpc_endpoint_id = "",
        vpc_peering_connection_id = ""
      }]
    }
  }
  override_data {
    target = data.aws_route_table.existing["us-east-1b"]
    values = {
      routes = [{
        cidr_block                = "0.0.0.0/0", gateway_id = "igw-1", nat_gateway_id = "", ipv6_cidr_block = "",
        carrier_gateway_id        = "", core_network_arn = "", destination_prefix_list_id = "", egress_only_gateway_id = "",
        instance_id               = "", local_gateway_id = "", network_interface_id = "", transit_gateway_id = "", vpc_endpoint_id = "",
        vpc_peering_connection_id = ""
      }]
    }
  }

  assert {
    condition     = length(aws_vpc_endpoint.interface) == 5
    error_message = "endpoints in the VPC of others"
  }
}

run "the_bucket_of_import_path_is_made_private" {
  command = apply
  variables {
    existing_vpc_id     = ""
    existing_subnet_ids = []
    import_path         = "s3://my-bucket/ml-platform"
    data_bucket_enabled = true
  }

  assert {
    condition     = aws_s3_bucket.data[0].bucket == "my-bucket" && aws_s3_bucket.data[0].force_destroy != true
    error_message = "not the bucket of import_path, or one that is deleted with its data"
  }
  assert {
    condition     = aws_s3_bucket_versioning.data[0].versioning_configuration[0].status == "Enabled" && one(aws_s3_bucket_server_side_encryption_configuration.data[0].rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "versions or encryption"
  }
  assert {
    condition     = aws_s3_bucket_public_access_block.data[0].block_public_acls && aws_s3_bucket_public_access_block.data[0].restrict_public_buckets && strcontains(aws_s3_bucket_policy.data[0].policy, "aws:SecureTransport")
    error_message = "public, or without TLS"
  }
}

run "a_bucket_needs_its_name" {
  command = plan
  variables {
    existing_vpc_id     = ""
    existing_subnet_ids = []
    data_bucket_enabled = true
  }
  expect_failures = [aws_s3_bucket.data]
}

run "a_placement_group_goes_to_the_addons" {
  command = apply
  variables {
    existing_vpc_id             = ""
    existing_subnet_ids         = []
    efa_placement_group_enabled = true
  }

  assert {
    condition     = aws_placement_group.efa[0].strategy == "cluster" && output.placement_group == "fleet-efa"
    error_message = "placement group"
  }
}
