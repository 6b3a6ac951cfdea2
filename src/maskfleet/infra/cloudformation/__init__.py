"""CloudFormation: plan, up, status and down of the stacks under `deploy/cloudformation`."""
