"""Jobs as Python objects, for notebooks and scripts."""
