"""`maskfleet serve`: a page on which people try a model, and the same over HTTP."""
