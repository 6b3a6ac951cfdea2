"""Launch on this machine."""
