"""Sessions: who is connected, what waits, and who may send what."""
