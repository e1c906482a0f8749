"""Checks a history against the guarantees of the queue."""
