"""Published weights by name, in a cache."""
