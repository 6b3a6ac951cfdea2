"""What is behind the AP of a model: curves, confidence intervals, kinds of errors, confused classes, examples."""
