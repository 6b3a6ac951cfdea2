# The bucket of import_path, if asked for. `maskfleet infra down` keeps it, and AWS deletes no bucket with objects in it.

locals {
  new_bucket = var.data_bucket_enabled ? 1 : 0
}

resource "aws_s3_bucket" "data" {
  #checkov:skip=CKV_AWS_18:access logs need a second bucket; CloudTrail data events record the same
  #checkov:skip=CKV_AWS_19:it is encrypted below, with AES256 or a customer key; checkov does not evaluate the choice
  #checkov:skip=CKV_AWS_144:a copy in another region doubles the cost of data that can be downloaded again
  #checkov:skip=CKV_AWS_145:data_bucket_kms_key_arn names a customer key; a key of this root would be deleted with the cluster
  #checkov:skip=CKV2_AWS_62:nothing listens to events; FSx sets up its own notifications
  count = local.new_bucket

  bucket = local.data_bucket

  lifecycle {
    precondition {
      condition     = var.import_path != ""
      error_message = "data_bucket_enabled creates the bucket of import_path, which is empty."
    }
  }
}

resource "aws_s3_bucket_ownership_controls" "data" {
  count = local.new_bucket

  bucket = aws_s3_bucket.data[0].id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "data" {
  count = local.new_bucket

  bucket                  = aws_s3_bucket.data[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "data" {
  count = local.new_bucket

  bucket = aws_s3_bucket.data[0].id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "data" {
  count = local.new_bucket

  bucket = aws_s3_bucket.data[0].id
  rule {
    bucket_key_enabled = var.data_bucket_kms_key_arn != ""
    apply_server_side_encryption_by_default {
      sse_algorithm     = var.data_bucket_kms_key_arn == "" ? "AES256" : "aws:kms"
      kms_master_key_id = var.data_bucket_kms_key_arn == "" ? null : var.data_bucket_kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "data" {
  count = local.new_bucket

  bucket = aws_s3_bucket.data[0].id
  rule {
    id     = "old-versions"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = 30
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  depends_on = [aws_s3_bucket_versioning.data]
}

resource "aws_s3_bucket_policy" "data" {
  count = local.new_bucket

  bucket = aws_s3_bucket.data[0].id
  policy = module.policies.data_bucket

  depends_on = [aws_s3_bucket_public_access_block.data]
}
