"""Carries messages between processes: in-process and ZeroMQ."""
