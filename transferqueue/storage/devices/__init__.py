"""Columns on a device: what a device is asked for, memory that it may read, copies under way and what they keep
pinned."""
