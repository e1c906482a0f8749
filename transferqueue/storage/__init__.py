"""The data plane: arenas, extents, blocks and the gathering of rows."""
