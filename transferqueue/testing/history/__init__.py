"""The history of a run: what was asked and answered."""
