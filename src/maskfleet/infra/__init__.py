"""Infrastructure: drives the files under `deploy/`, and has no templates of its own."""
