"""Copy data sets between folders and S3, verified and resumable."""
