# A VPC of others: only read, and checked for what EKS, nodes and Karpenter need of it.

data "aws_vpc" "existing" {
  count = local.own_vpc ? 0 : 1

  id = var.existing_vpc_id

  lifecycle {
    precondition {
      condition     = length(var.existing_subnet_ids) == length(var.azs)
      error_message = "existing_subnet_ids has ${length(var.existing_subnet_ids)} subnets for ${length(var.azs)} azs."
    }
    precondition {
      condition     = length(var.azs) >= 2 && var.control_plane_az == ""
      error_message = "EKS puts its control plane into two zones: with existing_vpc_id name them both in azs, and leave control_plane_az empty."
    }
    precondition {
      condition     = contains(var.azs, local.efa_az) && contains(var.azs, local.fsx_az)
      error_message = "efa_az and fsx_az must be among azs."
    }
    postcondition {
      condition     = self.enable_dns_support && self.enable_dns_hostnames
      error_message = "existing_vpc_id ${var.existing_vpc_id} must have DNS support and DNS hostnames: the private endpoint of EKS is a name in it."
    }
  }
}

data "aws_subnet" "existing" {
  for_each = local.own_vpc ? {} : { for place, az in var.azs : az => var.existing_subnet_ids[place] if place < length(var.existing_subnet_ids) }

  id = each.value

  lifecycle {
    postcondition {
      condition     = self.vpc_id == data.aws_vpc.existing[0].id
      error_message = "existing_subnet_ids: ${each.value} is not a subnet of ${var.existing_vpc_id}."
    }
    postcondition {
      condition     = self.availability_zone == each.key
      error_message = "existing_subnet_ids: ${each.value} is in ${self.availability_zone}, not in ${each.key}; they are in the order of azs."
    }
    postcondition {
      condition     = self.available_ip_address_count >= 32
      error_message = "existing_subnet_ids: ${each.value} has ${self.available_ip_address_count} free addresses; EKS needs 16 at least, and every pod has one."
    }
    postcondition {
      condition     = lookup(self.tags, "karpenter.sh/discovery", "") == var.cluster_name
      error_message = "existing_subnet_ids: Karpenter finds subnets by a tag: aws ec2 create-tags --resources ${each.value} --tags Key=karpenter.sh/discovery,Value=${var.cluster_name}"
    }
    postcondition {
      condition     = !var.load_balancer_controller_enabled || contains(keys(self.tags), "kubernetes.io/role/internal-elb")
      error_message = "existing_subnet_ids: load balancers find subnets by a tag: aws ec2 create-tags --resources ${each.value} --tags Key=kubernetes.io/role/internal-elb,Value=1"
    }
  }
}

# Nodes have no public address, so an internet gateway is of no use to them.
data "aws_route_table" "existing" {
  for_each = data.aws_subnet.existing

  subnet_id = each.value.id

  lifecycle {
    postcondition {
      condition = length(var.interface_endpoints) > 0 || anytrue([
        for route in self.routes : route.cidr_block == "0.0.0.0/0" && !startswith(coalesce(route.gateway_id, "-"), "igw-")
      ])
      error_message = "existing_subnet_ids: ${each.value.id} has no route to 0.0.0.0/0 by a NAT or transit gateway, so nodes reach neither EKS nor a registry. Add one, or list interface_endpoints."
    }
  }
}
