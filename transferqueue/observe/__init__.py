"""Metrics, timeline and doctor: what a deployment is doing, and why."""
