"""What a run reports: metrics, TensorBoard, the live view and the final report."""
