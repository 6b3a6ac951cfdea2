"""What can be wrong with a data set, each problem with a remedy."""
