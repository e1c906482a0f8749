"""The state of rows and of the bytes that they have."""
