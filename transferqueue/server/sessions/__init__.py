"""Who is connected, who waits, who may do what."""
