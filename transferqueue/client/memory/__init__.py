"""The bytes of rows at a client: grants to write, mapped arenas, transfers from other hosts."""
