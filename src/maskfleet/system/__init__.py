"""The only code that touches the machine: files, locks, processes, AWS and Kubernetes clients."""
