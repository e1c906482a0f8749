"""Keys of servers and clients, and the check of a client's key when it connects."""
