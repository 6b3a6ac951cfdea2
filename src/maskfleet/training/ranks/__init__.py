"""What the ranks of a run settle between them: who joined, what must be equal, who stopped responding."""
