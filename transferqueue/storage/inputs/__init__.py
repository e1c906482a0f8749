"""Writing columns: the callers' inputs, parsed into blocks."""
