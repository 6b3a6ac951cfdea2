# What Karpenter needs in AWS. Its controller is a chart of the add-ons root; its pools are the chart gpu-nodes.

locals {
  interruption_events = {
    health               = { source = "aws.health", type = "AWS Health Event" }
    spot                 = { source = "aws.ec2", type = "EC2 Spot Instance Interruption Warning" }
    rebalance            = { source = "aws.ec2", type = "EC2 Instance Rebalance Recommendation" }
    state                = { source = "aws.ec2", type = "EC2 Instance State-change Notification" }
    capacity_reservation = { source = "aws.ec2", type = "EC2 Capacity Reservation Instance Interruption Warning" }
  }
}

# Nodes close to each other in the network; Karpenter starts the nodes of its EFA pool in it.
resource "aws_placement_group" "efa" {
  count = var.efa_placement_group_enabled ? 1 : 0

  name     = "${var.cluster_name}-efa"
  strategy = "cluster"
}

resource "aws_sqs_queue" "karpenter" {
  name                      = "${var.cluster_name}-karpenter"
  message_retention_seconds = 300
  sqs_managed_sse_enabled   = true
}

resource "aws_sqs_queue_policy" "karpenter" {
  queue_url = aws_sqs_queue.karpenter.url
  policy    = module.policies.interruption_queue
}

resource "aws_cloudwatch_event_rule" "interruption" {
  for_each = local.interruption_events

  name          = "${var.cluster_name}-karpenter-${replace(each.key, "_", "-")}"
  description   = "${each.value.type} to Karpenter"
  event_pattern = jsonencode({ source = [each.value.source], detail-type = [each.value.type] })
}

resource "aws_cloudwatch_event_target" "interruption" {
  for_each = local.interruption_events

  rule      = aws_cloudwatch_event_rule.interruption[each.key].name
  target_id = "karpenter"
  arn       = aws_sqs_queue.karpenter.arn
}
