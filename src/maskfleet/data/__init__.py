"""From COCO-format files to padded batches."""
