"""The history of a run: calls and results."""
