"""Launch on Amazon EKS."""
