"""Writing columns: what callers pass, parsed into blocks."""
