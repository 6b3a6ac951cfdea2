"""Elastic jobs: an Indexed Job whose pods each run a supervisor, and continue without the pods that are lost."""
