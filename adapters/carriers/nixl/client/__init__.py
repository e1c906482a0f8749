"""The client's part: memory that it registers, and the transfers over it."""
