"""Where a run happens: this machine, hosts reached by SSH, SageMaker, EKS. Nothing here imports torch."""
