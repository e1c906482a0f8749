"""Typed answers of a server to `Observe`."""
