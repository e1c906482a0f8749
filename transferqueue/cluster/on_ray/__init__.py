"""A deployment on Ray."""
