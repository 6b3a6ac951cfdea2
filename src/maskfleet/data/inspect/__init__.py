"""The HTML page about a data set."""
