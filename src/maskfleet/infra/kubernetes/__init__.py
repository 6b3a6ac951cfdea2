"""Access to the cluster that Terraform made, and the objects in it that Terraform does not manage."""
