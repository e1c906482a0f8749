"""The bytes of rows as a client sees them: grants to write, mapped arenas, transfers from other hosts."""
