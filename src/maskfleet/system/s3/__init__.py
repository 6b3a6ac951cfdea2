"""S3 with few instructions per request."""
