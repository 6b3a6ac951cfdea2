"""Worker processes: how they start and end, and two ways to call functions in them."""
