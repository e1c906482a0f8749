"""Memory of a server: its own arena, and which memory grants the next extent."""
