"""A cluster that maskfleet did not create: what it has, what is missing, and how to remove only what was installed."""
