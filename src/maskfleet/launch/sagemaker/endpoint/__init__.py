"""Endpoints on SageMaker that answer with a trained model."""
