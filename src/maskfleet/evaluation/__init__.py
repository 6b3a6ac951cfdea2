"""AP of detections and of trained models, and the report."""
