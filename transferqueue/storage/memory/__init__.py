"""Memory: allocation, arenas, mappings, copies, checksums."""
