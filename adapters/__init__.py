"""Adapters that make one engine or framework a producer or a consumer of the queue."""
