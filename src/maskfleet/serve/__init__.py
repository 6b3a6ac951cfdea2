"""Detection over HTTP: one model, one batching queue, and an app to which pages can be added."""
