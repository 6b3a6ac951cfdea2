# What the provider validates even in a mock: ARNs, ids, lists with an element.

mock_data "aws_caller_identity" {
  defaults = { account_id = "111122223333" }
}
mock_data "aws_partition" {
  defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
}
mock_resource "aws_eks_cluster" {
  defaults = {
    arn                   = "arn:aws:eks:us-east-1:111122223333:cluster/fleet"
    certificate_authority = [{ data = "bW9jaw==" }]
    identity              = [{ oidc = [{ issuer = "https://oidc.eks.us-east-1.amazonaws.com/id/ABCDEF" }] }]
  }
}
mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::111122223333:role/mock" }
}
mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:us-east-1:111122223333:key/mock" }
}
mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:us-east-1:111122223333:log-group:mock" }
}
mock_resource "aws_sqs_queue" {
  defaults = { arn = "arn:aws:sqs:us-east-1:111122223333:mock" }
}
mock_resource "aws_iam_openid_connect_provider" {
  defaults = { arn = "arn:aws:iam::111122223333:oidc-provider/mock" }
}
mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}
mock_resource "aws_fsx_lustre_file_system" {
  defaults = { arn = "arn:aws:fsx:us-east-1:111122223333:file-system/fs-0123456789abcdef0", id = "fs-0123456789abcdef0" }
}
