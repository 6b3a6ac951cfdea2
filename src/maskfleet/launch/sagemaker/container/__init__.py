"""What runs inside a SageMaker container: the programs `train` and `serve` of the image."""
