"""Checks of what a SageMaker job needs: its image, role, network and file systems."""
