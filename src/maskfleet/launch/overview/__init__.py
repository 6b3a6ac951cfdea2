"""All runs below a folder or an S3 prefix, at a glance."""
