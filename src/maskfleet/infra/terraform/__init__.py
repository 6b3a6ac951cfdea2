"""Terraform: plan, up, status and down."""
