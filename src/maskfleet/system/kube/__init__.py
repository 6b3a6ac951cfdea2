"""The Kubernetes API: client, exec and port-forward."""
