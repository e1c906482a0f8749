"""Columns on a device: the interface of a device, memory that it may read, and copies under way with the memory that
they keep pinned."""
