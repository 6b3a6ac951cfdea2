"""Launch on hosts reached by SSH."""
