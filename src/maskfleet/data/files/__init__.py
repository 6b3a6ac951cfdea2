"""Where image files are: in a folder, in tar shards, in S3."""
