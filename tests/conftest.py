"""pyproject.toml puts tests/ on the path: tests import the slow references (reference*.py) by name."""
