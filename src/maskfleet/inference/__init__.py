"""From a trained run or a weights file to detections."""
