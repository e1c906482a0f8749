"""Whole jobs as producers and consumers of one queue: stages, recipes and their runner."""
