"""From images and annotations to padded batches."""
