"""The report of one or several runs: one self-contained HTML file."""
