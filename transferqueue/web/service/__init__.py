"""The HTTP service: put, lease and ack for programs without this package."""
