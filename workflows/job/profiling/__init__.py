"""Measures what a planner is told of a job: its engine, its trainer, its rewards and its publication, one after the
other.
"""
