"""Jobs in the cluster beside trainings."""
