"""What a supervisor tells about its host, and what commands conclude from it."""
