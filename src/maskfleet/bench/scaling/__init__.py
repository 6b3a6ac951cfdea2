"""A model of training on many GPUs: predicted step time and efficiency, and what limits them."""
