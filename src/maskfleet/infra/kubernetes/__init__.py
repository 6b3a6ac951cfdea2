"""What lives in the cluster and Terraform does not know."""
