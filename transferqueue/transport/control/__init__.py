"""Control frames: in process, over a socket file, over ZeroMQ."""
