"""Messages and frames: pure, typed MessagePack."""
