"""Names of TensorPack, AWS Samples, the SageMaker notebooks and the EKS charts, mapped to ours."""
