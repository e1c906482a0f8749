"""Column bytes between hosts."""
