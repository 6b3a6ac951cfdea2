"""From weights to predictions, AP and a report."""
