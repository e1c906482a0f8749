"""A small transformer and how it generates."""
