"""Runs as SageMaker training jobs."""
