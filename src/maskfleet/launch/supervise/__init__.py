"""One supervisor per host: keeps its ranks alive and notices lost hosts."""
