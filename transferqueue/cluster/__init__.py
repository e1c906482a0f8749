"""Starts and finds the processes of a deployment on a cluster: shards, other stores behind shards, and Ray
(docs/decisions/ray.md).

Importing this package does not load Ray; the functions that need Ray import it when they are called.
"""
