locals {
  own_vpc = var.existing_vpc_id == ""
  vpc_id  = local.own_vpc ? aws_vpc.this[0].id : data.aws_vpc.existing[0].id

  # A zone without a range is omitted here, so that the VPC's precondition can name the variable that has too few.
  new_private    = local.own_vpc ? local.private_ranges : {}
  private_ranges = { for place, az in var.azs : az => var.cidr_private[place] if place < length(var.cidr_private) }
  public_subnets = { for place, az in var.azs : az => var.cidr_public[place] if place < length(var.cidr_public) && local.own_vpc }
  nat_azs        = toset(!local.own_vpc ? [] : var.nat_gateway_per_az ? var.azs : slice(var.azs, 0, 1))
  # Ids by zone; the keys are known before anything exists.
  private_subnets = local.own_vpc ? { for az, subnet in aws_subnet.private : az => subnet.id } : { for az, subnet in data.aws_subnet.existing : az => subnet.id }
  efa_az          = var.efa_az == "" ? var.azs[0] : var.efa_az
  fsx_az          = var.fsx_az == "" ? local.efa_az : var.fsx_az

  control_plane_azs = distinct(concat(var.azs, compact([var.control_plane_az])))
  subnet_cidrs = concat(
    values(local.private_ranges), values(local.public_subnets), var.control_plane_az == "" ? [] : [var.cidr_control_plane]
  )
  vpc_prefix = tonumber(split("/", var.cidr_vpc)[1])
  # Two ranges overlap if they agree on the shorter of their prefixes.
  overlaps = flatten([
    for place, one in local.subnet_cidrs : [
      for other in slice(local.subnet_cidrs, place + 1, length(local.subnet_cidrs)) : "${one} and ${other}"
      if cidrhost("${split("/", one)[0]}/${min(split("/", one)[1], split("/", other)[1])}", 0) ==
      cidrhost("${split("/", other)[0]}/${min(split("/", one)[1], split("/", other)[1])}", 0)
    ]
  ])
  outside = [
    for cidr in local.subnet_cidrs : cidr if tonumber(split("/", cidr)[1]) < local.vpc_prefix ||
    cidrhost("${split("/", cidr)[0]}/${local.vpc_prefix}", 0) != cidrhost(var.cidr_vpc, 0)
  ]
}

# Names of zones differ between accounts, ids do not: which of us-east-1a to f is use1-az3 only AWS can say.
data "aws_availability_zone" "used" {
  for_each = toset(local.control_plane_azs)

  name = each.key

  lifecycle {
    postcondition {
      condition     = !contains(["use1-az3", "usw1-az2", "cac1-az3"], self.zone_id)
      error_message = "azs and control_plane_az: ${each.key} is AWS's zone ${self.zone_id} in this account, where EKS puts no control plane; choose another zone."
    }
  }
}

resource "aws_vpc" "this" {
  count = local.own_vpc ? 1 : 0

  cidr_block           = var.cidr_vpc
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.cluster_name }

  lifecycle {
    precondition {
      condition     = length(var.cidr_private) >= length(var.azs)
      error_message = "cidr_private has ${length(var.cidr_private)} ranges for ${length(var.azs)} azs."
    }
    precondition {
      condition     = length(var.cidr_public) >= length(var.azs)
      error_message = "cidr_public has ${length(var.cidr_public)} ranges for ${length(var.azs)} azs."
    }
    precondition {
      condition     = alltrue([for az in local.control_plane_azs : substr(az, 0, length(az) - 1) == var.region])
      error_message = "azs and control_plane_az must be zones of region ${var.region}."
    }
    precondition {
      condition     = length(local.control_plane_azs) >= 2
      error_message = "EKS puts its control plane into two zones: name a second one in azs, or in control_plane_az."
    }
    precondition {
      condition     = contains(var.azs, local.efa_az) && contains(var.azs, local.fsx_az)
      error_message = "efa_az and fsx_az must be among azs."
    }
    precondition {
      condition     = length(local.outside) == 0
      error_message = "cidr_vpc ${var.cidr_vpc} does not contain ${join(", ", local.outside)} of cidr_private, cidr_public or cidr_control_plane."
    }
    precondition {
      condition     = length(local.overlaps) == 0
      error_message = "Ranges of cidr_private, cidr_public and cidr_control_plane overlap: ${join("; ", local.overlaps)}."
    }
  }
}

# Without rules, so that nothing uses it by accident.
resource "aws_default_security_group" "this" {
  count = local.own_vpc ? 1 : 0

  vpc_id = local.vpc_id
}

resource "aws_subnet" "private" {
  for_each = local.new_private

  vpc_id            = local.vpc_id
  availability_zone = each.key
  cidr_block        = each.value
  tags = {
    Name                                        = "${var.cluster_name}-private-${each.key}"
    "kubernetes.io/cluster/${var.cluster_name}" = "shared"
    "kubernetes.io/role/internal-elb"           = "1"
    "karpenter.sh/discovery"                    = var.cluster_name
  }
}

resource "aws_subnet" "public" {
  for_each = local.public_subnets

  vpc_id                  = local.vpc_id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false
  tags = {
    Name                                        = "${var.cluster_name}-public-${each.key}"
    "kubernetes.io/cluster/${var.cluster_name}" = "shared"
    "kubernetes.io/role/elb"                    = "1"
  }
}

# Without discovery tags: neither nodes nor load balancers are placed here.
resource "aws_subnet" "control_plane" {
  count = var.control_plane_az == "" || !local.own_vpc ? 0 : 1

  vpc_id            = local.vpc_id
  availability_zone = var.control_plane_az
  cidr_block        = var.cidr_control_plane
  tags              = { Name = "${var.cluster_name}-control-plane-${var.control_plane_az}" }
}

resource "aws_internet_gateway" "this" {
  count = local.own_vpc ? 1 : 0

  vpc_id = local.vpc_id
  tags   = { Name = var.cluster_name }
}

resource "aws_eip" "nat" {
  #checkov:skip=CKV2_AWS_19:the address belongs to a NAT gateway
  for_each = local.nat_azs

  domain = "vpc"
  tags   = { Name = "${var.cluster_name}-nat-${each.key}" }
}

resource "aws_nat_gateway" "this" {
  for_each = local.nat_azs

  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = aws_subnet.public[each.key].id
  tags          = { Name = "${var.cluster_name}-${each.key}" }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  count = local.own_vpc ? 1 : 0

  vpc_id = local.vpc_id
  tags   = { Name = "${var.cluster_name}-public" }
}

resource "aws_route" "internet" {
  count = local.own_vpc ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_route_table" "private" {
  for_each = local.new_private

  vpc_id = local.vpc_id
  tags   = { Name = "${var.cluster_name}-private-${each.key}" }
}

resource "aws_route" "nat" {
  for_each = local.new_private

  route_table_id         = aws_route_table.private[each.key].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[var.nat_gateway_per_az ? each.key : var.azs[0]].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[each.key].id
}

resource "aws_route_table_association" "control_plane" {
  count = var.control_plane_az == "" || !local.own_vpc ? 0 : 1

  subnet_id      = aws_subnet.control_plane[0].id
  route_table_id = aws_route_table.private[var.azs[0]].id
}

# Data and image layers come from S3: free through this endpoint, billed through NAT.
resource "aws_vpc_endpoint" "s3" {
  count = local.own_vpc ? 1 : 0

  vpc_id            = local.vpc_id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = concat([aws_route_table.public[0].id], [for table in aws_route_table.private : table.id])
  tags              = { Name = "${var.cluster_name}-s3" }
}

# AWS's APIs without NAT, for networks that send nothing to the internet; each is billed by zone and hour.
resource "aws_vpc_endpoint" "interface" {
  for_each = toset(var.interface_endpoints)

  vpc_id              = local.vpc_id
  service_name        = "com.amazonaws.${var.region}.${each.value}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for az in var.azs : local.private_subnets[az]]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  tags                = { Name = "${var.cluster_name}-${each.value}" }
}

resource "aws_security_group" "endpoints" {
  count = length(var.interface_endpoints) > 0 ? 1 : 0

  name        = "${var.cluster_name}-endpoints"
  description = "HTTPS from the nodes of ${var.cluster_name} to AWS"
  vpc_id      = local.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = length(var.interface_endpoints) > 0 ? 1 : 0

  security_group_id            = aws_security_group.endpoints[0].id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  description                  = "HTTPS from nodes"
}

resource "aws_cloudwatch_log_group" "flow" {
  count = local.own_vpc ? 1 : 0

  name              = "/aws/vpc/${var.cluster_name}/flow"
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.cluster.arn
}

resource "aws_flow_log" "this" {
  count = local.own_vpc ? 1 : 0

  vpc_id          = local.vpc_id
  traffic_type    = "REJECT"
  iam_role_arn    = aws_iam_role.service["flow_logs"].arn
  log_destination = aws_cloudwatch_log_group.flow[0].arn
}
