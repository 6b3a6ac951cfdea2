"""YOLO, Pascal VOC and LabelMe to COCO format."""
