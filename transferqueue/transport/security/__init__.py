"""Keys, and who may connect with which."""
