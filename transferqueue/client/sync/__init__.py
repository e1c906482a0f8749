"""The API for threads."""
